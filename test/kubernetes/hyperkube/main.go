// Command hyperkube contains every program of Kubernetes that a test's cluster needs, and
// kube-router, in the versions of go.mod. Its name or its first argument selects one. It is a
// separate module, so that nothing else here depends on Kubernetes.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	router "github.com/cloudnativelabs/kube-router/v2/pkg/cmd"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	cmd := command(name)
	if cmd == nil && len(os.Args) > 1 {
		name, os.Args = os.Args[1], os.Args[1:]
		cmd = command(name)
	}
	switch {
	case cmd == nil:
		fmt.Fprintf(os.Stderr, "hyperkube: no program %q\n", name)
		os.Exit(2)
	case name == "kubectl":
		if err := cli.RunNoErrOutput(cmd); err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			os.Exit(1)
		}
	default:
		os.Exit(cli.Run(cmd))
	}
}

// command returns the program with a name, or nil.
func command(name string) *cobra.Command {
	switch name {
	case "kube-apiserver":
		return apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		return controllers.NewControllerManagerCommand()
	case "kube-scheduler":
		return scheduler.NewSchedulerCommand()
	case "kube-proxy":
		return proxy.NewProxyCommand()
	case "kubelet":
		return kubelet.NewKubeletCommand(context.Background())
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand()
	case "kube-router":
		config := options.NewKubeRouterConfig()
		cmd := &cobra.Command{Use: name, RunE: func(*cobra.Command, []string) error {
			r, err := router.NewKubeRouterDefault(config)
			if err != nil {
				return err
			}
			return r.Run()
		}}
		config.AddFlags(cmd.Flags())
		return cmd
	}
	return nil
}
