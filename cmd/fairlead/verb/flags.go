package verb

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/metrics"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/record"
)

// AgentFlags are the flags of the agent, which are also the keys of the config file. Other verbs
// take the flags that they need by name.
type AgentFlags struct {
	Config   string // path of the config file; "": none
	Level    string // of the log
	TakeOver bool
	Linger   time.Duration
	Health   string // directory; "": none
	Cfg      agent.Config

	Features *pflag.FlagSet // only the flags of the features
}

// NewAgentFlags returns the flags with their defaults, and the set to parse them by.
func NewAgentFlags(e Env) (*AgentFlags, *pflag.FlagSet) {
	f := &AgentFlags{Cfg: agent.Config{Roots: kernel.Default(), Version: e.Version}}
	f.Cfg.RecordSize = record.DefaultSize
	s := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	s.StringVar(&f.Config, "config", defaultConfig, "config file; every flag can be set in it as \"flag: value\"; empty: none")
	s.StringVar(&f.Cfg.Socket, "socket", api.DefaultSocket, "unix socket of the agent")
	s.StringVar(&f.Cfg.SelfSocket, "self-socket", filepath.Base(api.DefaultSelfSocket), "unix socket on which a container sees its own data; a name without / is one beside --socket; empty: none")
	s.StringVar(&f.Cfg.ViewGroup, "view-group", "fairlead-view", "group, by name or number, whose members may look and change nothing: a socket beside --socket and the recording are theirs, if the host has it; empty: none")
	s.StringVar(&f.Cfg.StateDir, "state-dir", defaultState, "directory of the journal")
	s.StringVar(&f.Cfg.PolicyDir, "policy-dir", defaultPolicies, "directory of the policy files *.yaml")
	s.BoolVar(&f.Cfg.ImageLabels, "image-labels", false, "labels of images are policy, as labels of containers are: for hosts where only those who may set policy build images")
	s.StringVar(&f.Cfg.DockerHost, "docker-host", e.Getenv("DOCKER_HOST"), "address of Docker, as in DOCKER_HOST; empty: its usual socket")
	s.StringVar(&f.Cfg.PodmanHost, "podman-host", "", "address of Podman, as in DOCKER_HOST; empty: its usual socket")
	s.StringVar(&f.Cfg.ContainerdAddr, "containerd", "", "unix socket of containerd; empty: its usual one, and those of k3s and RKE2, MicroK8s, and k0s")
	s.StringVar(&f.Cfg.CRIOAddr, "crio", "", "unix socket of CRI-O; empty: its usual one")
	s.StringVar(&f.Cfg.KubeletDir, "kubelet-dir", "", "directory of kubelet, usually /var/lib/kubelet: offer what can be guaranteed to pods as resources of the node, and guarantee what they request of it; empty: do not")
	s.StringVar(&f.Cfg.Kubeconfig, "kubeconfig", "", "kubeconfig, or in-cluster for the service account of the agent's pod, to follow annotations that change while pods run; it needs the right to list and watch pods; empty: those of a pod's start count")
	s.StringVar(&f.Cfg.NodeName, "node-name", e.Getenv("NODE_NAME"), "name of this node at the API server, as in NODE_NAME; empty: the host's name")
	s.StringVar(&f.Cfg.SandboxDir, "sandbox-dir", "", "where the sandboxes of demo, bench and tests write what they are; empty: the usual directory")
	s.StringVar(&f.Cfg.MetricsAddr, "metrics-addr", metrics.DefaultAddr, "address of the metrics page, or unix:/path for a socket of mode 0660; empty: none")
	s.StringVar(&f.Cfg.MetricsToken, "metrics-token-file", "", "file with the token that the metrics page wants as \"Authorization: Bearer TOKEN\"; while it cannot be read, all are refused; empty: the page is for all who can connect")
	s.StringVar(&f.Cfg.RecordDir, "record-dir", defaultRecord, "directory of the recording; empty: nothing is recorded")
	s.Var((*sizeFlag)(&f.Cfg.RecordSize), "record-size", "most that the recording takes on disk, such as 64mb")
	s.DurationVar(&f.Cfg.RecordAge, "record-age", record.DefaultAge, "how long the recording goes back at most")
	s.StringVar(&f.Cfg.Roots.Proc, "proc", f.Cfg.Roots.Proc, "where the host's proc is mounted, with writable sys/net and irq; in a container its own is read-only there")
	s.StringVar(&f.Cfg.Roots.BPFFS, "bpffs", f.Cfg.Roots.BPFFS, "where the BPF file system is mounted")
	f.Features = pflag.NewFlagSet("features", pflag.ContinueOnError)
	for _, add := range e.Flags {
		add(f.Features, &f.Cfg.FeatureConfig)
	}
	s.AddFlagSet(f.Features)
	s.BoolVar(&f.TakeOver, "take-over", false, "if another agent works on this host, wait until it stops, and go on with what it has applied")
	s.DurationVar(&f.Linger, "linger", 0, "how long the agent works on after it was told to stop, before it undoes all changes: longer than a supervisor that starts it again waits before it kills it, 5s with Kubernetes")
	s.StringVar(&f.Health, "health-dir", "", "directory in which the agent shows fairlead health that it is ready and alive; empty: it does not")
	s.StringVar(&f.Level, "log-level", "info", "lowest level to log: debug, info, warn or error")
	return f, s
}

// Take adds some of the agent's flags to cmd.
func (f *AgentFlags) Take(cmd *cobra.Command, from *pflag.FlagSet, names ...string) {
	for _, n := range names {
		cmd.Flags().AddFlag(from.Lookup(n))
	}
}

// maxDevice is the longest name of a device (IFNAMSIZ, without the final NUL).
const maxDevice = 15

// CheckDevice returns an error unless name is a valid name of a device.
func CheckDevice(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > maxDevice || strings.ContainsAny(name, "/: \t") {
		return fmt.Errorf("%q is not a device name", name)
	}
	return nil
}

// Pairs is a flag that lists names, each alone or with a value: "eth0=1gbit,eth1".
type Pairs[V any] struct {
	To     *map[string]V
	Form   string // what the help calls it
	Parse  func(name, text string, given bool) (V, error)
	Format func(V) string // "": the name stands alone
}

// Set implements pflag.Value: it adds to what is there.
func (p Pairs[V]) Set(s string) error {
	for one := range strings.SplitSeq(s, ",") {
		name, text, given := strings.Cut(strings.TrimSpace(one), "=")
		v, err := p.Parse(name, text, given)
		if err != nil {
			return err
		}
		if _, twice := (*p.To)[name]; twice {
			return errors.New(name + " is given twice")
		}
		if *p.To == nil {
			*p.To = make(map[string]V)
		}
		(*p.To)[name] = v
	}
	return nil
}

// String implements pflag.Value.
func (p Pairs[V]) String() string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(*p.To)) {
		if text := p.Format((*p.To)[name]); text != "" {
			name += "=" + text
		}
		out = append(out, name)
	}
	return strings.Join(out, ",")
}

// Type implements pflag.Value.
func (p Pairs[V]) Type() string { return p.Form }

// sizeFlag is a flag whose value is a number of bytes, in the units of policy.
type sizeFlag int64

func (s *sizeFlag) Set(text string) error {
	n, err := policy.ParseSize(text)
	if err != nil {
		return err
	}
	*s = sizeFlag(min(n, 1<<50))
	return nil
}

func (s *sizeFlag) String() string { return policy.FormatSize(uint64(*s)) }

func (s *sizeFlag) Type() string { return "size" }

const (
	defaultConfig   = "/etc/fairlead/fairlead.yaml"
	defaultState    = "/run/fairlead/state" // containers cannot fill it, and its content ends with the boot, as the changes do
	defaultRecord   = "/var/lib/fairlead/record"
	defaultPolicies = "/etc/fairlead/policy.d"
)

// setting is one "key: value" of the config file.
type setting struct {
	key, value string
	line       int
}

// readConfig reads a config file: one mapping from names of the agent's flags to scalars.
func readConfig(path string) ([]setting, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	return parseConfig(path, data)
}

func parseConfig(path string, data []byte) ([]setting, error) {
	file, err := parser.ParseBytes(data, 0)
	if err != nil {
		return nil, fmt.Errorf("config %s: %w", path, err)
	}
	var out []setting
	seen := map[string]int{}
	for _, doc := range file.Docs {
		var values []*ast.MappingValueNode
		switch body := doc.Body.(type) {
		case nil, *ast.NullNode, *ast.CommentGroupNode:
		case *ast.MappingNode:
			values = body.Values
		case *ast.MappingValueNode:
			values = []*ast.MappingValueNode{body}
		default:
			return nil, fmt.Errorf("config %s:%d: must be lines of the form \"key: value\"", path, body.GetToken().Position.Line)
		}
		for _, v := range values {
			s := setting{key: v.Key.String(), line: v.Key.GetToken().Position.Line}
			switch n := v.Value.(type) {
			case *ast.StringNode:
				s.value = n.Value
			case *ast.NullNode:
			case ast.ScalarNode:
				s.value = n.GetToken().Value
			default:
				return nil, fmt.Errorf("config %s:%d: %s: the value must be a word or a number", path, s.line, s.key)
			}
			if first := seen[s.key]; first != 0 {
				return nil, fmt.Errorf("config %s:%d: %s is already set in line %d", path, s.line, s.key, first)
			}
			seen[s.key] = s.line
			out = append(out, s)
		}
	}
	return out, nil
}

// Configure sets the flags of cmd from the config file, except those on the command line.
// The file may be missing unless --config names it.
func Configure(cmd *cobra.Command, path string, known *pflag.FlagSet) error {
	if path == "" {
		return nil
	}
	settings, err := readConfig(path)
	if errors.Is(err, fs.ErrNotExist) && !cmd.Flags().Changed("config") {
		return nil
	}
	if err != nil {
		return err
	}
	for _, s := range settings {
		if known.Lookup(s.key) == nil || s.key == "config" {
			return fmt.Errorf("config %s:%d: unknown key %q", path, s.line, s.key)
		}
		f := cmd.Flags().Lookup(s.key)
		if f == nil || f.Changed {
			continue // for another verb, or set on the command line
		}
		if err := f.Value.Set(s.value); err != nil {
			return fmt.Errorf("config %s:%d: %s: %q: %s", path, s.line, s.key, s.value, cli.Refusal(f, err))
		}
	}
	return nil
}
