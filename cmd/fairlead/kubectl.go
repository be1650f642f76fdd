package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// The names under which kubectl calls this program: as its plugin, and to complete the plugin's words.
const (
	kubectlName     = "kubectl-fairlead"
	kubectlComplete = "kubectl_complete-fairlead"
)

// runAs runs the program by the name under which it was called, and returns the exit status.
func runAs(ctx context.Context, name string, e cli.Env) int {
	switch filepath.Base(name) {
	case kubectlComplete:
		e.Args = append([]string{cobra.ShellCompRequestCmd}, e.Args...)
		fallthrough
	case kubectlName:
		k := kubectl{e: e}
		status := k.program().Run(ctx, e)
		return cmp.Or(k.status, status)
	}
	return run(ctx, e)
}

// kubectl is the plugin `kubectl fairlead`. It runs a verb in the agent's pod on a container's
// node, or in the read-only pod there. It uses the caller's kubectl, with the caller's kubeconfig
// and rights.
type kubectl struct {
	e      cli.Env
	status int // of the verb in the pod, if that failed

	namespace, context, kubeconfig string // as kubectl's flags
	agents, node                   string
}

// program contains the verbs that work in the pod, with the same flags and help as on the node.
func (k *kubectl) program() cli.Program {
	p := cli.Program{
		Name:    "kubectl fairlead",
		Short:   "Run a verb of fairlead on the node of a pod",
		Version: agent.VersionOf(version),
	}
	p.Verbs = append(p.Verbs, func(cli.Env) *cobra.Command {
		return &cobra.Command{
			Use:   "completion",
			Short: "Say how a shell completes the words of kubectl fairlead",
			Args:  cli.NArgs(0, 0, ""),
			RunE: func(*cobra.Command, []string) error {
				_, err := fmt.Fprintf(k.e.Stdout, "kubectl completes them by %s in PATH, which is this program under another name:\n  ln -s %s \"$(dirname \"$(command -v %s)\")/%s\"\n", kubectlComplete, kubectlName, kubectlName, kubectlComplete)
				return err
			},
		}
	})
	for _, verb := range verbs() {
		p.Verbs = append(p.Verbs, func(e cli.Env) *cobra.Command {
			cmd := verb(e)
			switch cmd.Name() {
			case "agent", "web": // the pod is the one, and a page in it helps nobody
				cmd.Hidden = true
				cmd.RunE = func(*cobra.Command, []string) error { return cli.Usagef("works on the node only") }
			case "version", "keys": // need no agent
			default:
				k.remote(cmd)
			}
			return cmd
		})
	}
	return p
}

// remote makes a verb, and the verbs below it, run in the pod.
func (k *kubectl) remote(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		if sub.CommandPath() == "policy check" {
			continue // it needs no agent, and its files are here
		}
		k.remote(sub)
	}
	cmd.Example = strings.ReplaceAll(cmd.Example, "  fairlead ", "  kubectl fairlead ")
	own := cmd.LocalFlags()
	for _, name := range []string{"socket", "config"} {
		if f := own.Lookup(name); f != nil {
			f.Hidden = true // of the pod
		}
	}
	s := pflag.NewFlagSet("kubectl", pflag.ContinueOnError)
	s.StringVarP(&k.namespace, "namespace", "n", "", "namespace of a CONTAINER that is given without one")
	s.StringVar(&k.context, "context", "", "context of the kubeconfig")
	s.StringVar(&k.kubeconfig, "kubeconfig", "", "path of the kubeconfig")
	s.StringVar(&k.agents, "agent-namespace", agentNamespace, "namespace of the agents; by default, "+strings.Join(looking, ", ")+" run in the readers' pods where there are any, in "+viewNamespace)
	s.StringVar(&k.node, "node", "", "node, for a verb without a CONTAINER")
	cmd.Flags().AddFlagSet(s)
	cmd.RegisterFlagCompletionFunc("node", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		pods, _ := k.pods(cmd.Context(), k.agents)
		var nodes []string
		for _, p := range pods {
			nodes = append(nodes, p.Spec.NodeName)
		}
		return nodes, cobra.ShellCompDirectiveNoFileComp
	})
	if ofContainer(cmd) {
		cmd.ValidArgsFunction = k.complete
	}
	if here := cmd.RunE; here != nil {
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			switch {
			case cmd.Flags().Changed("replay"): // a file of here, which needs no agent
				return here(cmd, args)
			case verbOf(cmd) == "record export" && !filepath.IsAbs(args[0]):
				return cli.Usagef("the file is made on the node: give a path there that the agent may write, such as /var/lib/fairlead/%s", filepath.Base(args[0]))
			}
			return k.run(cmd, s, args)
		}
	}
}

// The namespaces of agents, and of the read-only pods of packaging/kubernetes/view.
const (
	agentNamespace = "fairlead-system"
	viewNamespace  = "fairlead-view"
)

// looking lists the verbs that run in a read-only pod.
var looking = []string{"ps", "top", "report", "explain"}

// ofContainer reports whether the first argument of a verb is a container.
func ofContainer(cmd *cobra.Command) bool {
	words := strings.Fields(cmd.Use)
	return len(words) > 1 && strings.HasPrefix(strings.TrimLeft(words[1], "["), "CONTAINER")
}

// complete lists the pods of the namespace.
func (k *kubectl) complete(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	var list struct{ Items []pod }
	if len(args) > 0 || k.get(cmd.Context(), &list, append([]string{"get", "pods"}, k.in(k.namespace)...)...) != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, p := range list.Items {
		name := p.Metadata.Name
		if k.namespace == "" {
			name = p.Metadata.Namespace + "/" + name
		}
		names = append(names, name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// run runs a verb in the pod of the node's agent. flags are kubectl's.
func (k *kubectl) run(cmd *cobra.Command, flags *pflag.FlagSet, args []string) error {
	node := k.node
	if ofContainer(cmd) && len(args) > 0 && node == "" {
		namespace, name, rest := k.reference(args[0])
		var p pod // without a namespace, of that which kubectl takes
		if err := k.get(cmd.Context(), &p, append(append([]string{"get", "pod"}, k.in(namespace)...), "--", name)...); err != nil {
			return err
		}
		if node = p.Spec.NodeName; node == "" {
			return fmt.Errorf("pod %s/%s is on no node yet", p.Metadata.Namespace, name)
		}
		args = append([]string{p.Metadata.Namespace + "/" + name + rest}, args[1:]...)
	}
	var to pod
	err := errors.ErrUnsupported
	if k.agents == agentNamespace && slices.Contains(looking, verbOf(cmd)) {
		to, err = k.podOn(cmd.Context(), viewNamespace, node)
	}
	if err != nil {
		to, err = k.podOn(cmd.Context(), k.agents, node)
	}
	if err != nil {
		return err
	}
	argv := append([]string{"exec", "--stdin"}, k.in(to.Metadata.Namespace)...)
	if in, ok := k.e.Stdin.(io.Writer); ok && cli.Terminal(in) && cli.Terminal(k.e.Stdout) {
		argv = append(argv, "--tty")
	}
	argv = append(argv, to.Metadata.Name, "--", "fairlead")
	argv = append(argv, strings.Fields(verbOf(cmd))...)
	cmd.Flags().Visit(func(f *pflag.Flag) {
		values := []string{f.Value.String()}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		for _, v := range values {
			if flags.Lookup(f.Name) == nil {
				argv = append(argv, "--"+f.Name+"="+v)
			}
		}
	})
	if len(args) > 0 {
		argv = append(append(argv, "--"), args...)
	}
	// Not by the context: kubectl itself gets a Ctrl-C, and the verb in the pod ends first.
	run := k.command(context.WithoutCancel(cmd.Context()), argv...)
	run.Stdin, run.Stdout, run.Stderr = k.e.Stdin, k.e.Stdout, k.e.Stderr
	err = run.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		k.status = max(exit.ExitCode(), cli.Failed)
		return cli.ErrTold
	}
	return err
}

// verbOf returns the words of a verb.
func verbOf(cmd *cobra.Command) string {
	return strings.TrimSpace(strings.TrimPrefix(cmd.CommandPath(), cmd.Root().CommandPath()))
}

// reference splits [NAMESPACE/]POD[/CONTAINER]. Of two words the first is the namespace, unless a
// flag gives the namespace.
func (k *kubectl) reference(s string) (namespace, pod, rest string) {
	parts := strings.SplitN(s, "/", 3)
	if len(parts) == 1 || len(parts) == 2 && k.namespace != "" {
		parts = append([]string{k.namespace}, parts...)
	}
	if len(parts) == 3 {
		rest = "/" + parts[2]
	}
	return parts[0], parts[1], rest
}

// pod is the part of kubectl's JSON of a pod that is used here.
type pod struct {
	Metadata struct{ Name, Namespace string }
	Spec     struct{ NodeName string }
	Status   struct{ Phase string }
}

// pods returns the agents' pods, or the read-only pods, in a namespace.
func (k *kubectl) pods(ctx context.Context, namespace string) ([]pod, error) {
	var list struct{ Items []pod }
	err := k.get(ctx, &list, append([]string{"get", "pods", "--selector=app.kubernetes.io/name=fairlead"}, k.in(namespace)...)...)
	return list.Items, err
}

// podOn returns the pod on a node; without a node, the only pod.
func (k *kubectl) podOn(ctx context.Context, namespace, node string) (pod, error) {
	list, err := k.pods(ctx, namespace)
	if err != nil {
		return pod{}, err
	}
	list = slices.DeleteFunc(list, func(p pod) bool { return p.Status.Phase != "Running" })
	var nodes []string
	for _, p := range list {
		nodes = append(nodes, p.Spec.NodeName)
	}
	slices.Sort(nodes)
	nodes = slices.Compact(nodes) // during an update a node has two
	switch {
	case len(nodes) == 0:
		return pod{}, fmt.Errorf("no agent runs in namespace %s (--agent-namespace names another)", namespace)
	case node == "" && len(nodes) > 1:
		return pod{}, cli.Usagef("say which node by --node: %s", strings.Join(nodes, ", "))
	}
	i := slices.IndexFunc(list, func(p pod) bool { return node == "" || p.Spec.NodeName == node })
	if i < 0 {
		return pod{}, fmt.Errorf("no agent runs on node %s; agents run on %s", node, strings.Join(nodes, ", "))
	}
	return list[i], nil
}

// get runs kubectl and parses the JSON that it prints.
func (k *kubectl) get(ctx context.Context, into any, args ...string) error {
	var out, errs bytes.Buffer
	// Before the arguments, because a name may look like a flag.
	cmd := k.command(ctx, append([]string{args[0], "--output=json"}, args[1:]...)...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		if text := strings.TrimSpace(errs.String()); text != "" {
			return fmt.Errorf("kubectl %s: %s", args[0], text)
		}
		return fmt.Errorf("kubectl %s: %w", args[0], err)
	}
	if err := json.Unmarshal(out.Bytes(), into); err != nil {
		return fmt.Errorf("kubectl %s: read its answer: %w", args[0], err)
	}
	return nil
}

// in returns the flag for a namespace.
func (k *kubectl) in(namespace string) []string {
	if namespace == "" {
		return nil
	}
	return []string{"--namespace=" + namespace}
}

// command returns a call of the caller's kubectl.
func (k *kubectl) command(ctx context.Context, args ...string) *exec.Cmd {
	var flags []string
	for _, f := range []struct{ name, value string }{{"context", k.context}, {"kubeconfig", k.kubeconfig}} {
		if f.value != "" {
			flags = append(flags, "--"+f.name+"="+f.value)
		}
	}
	return exec.CommandContext(ctx, "kubectl", append(flags, args...)...)
}
