// Command render prints what Kubernetes would get, without a cluster:
//
//	render kustomize DIR
//	render helm CHART NAMESPACE <VALUES
//
// Tests use it in place of kubectl apply -k and helm install, which are made of the same modules.
// These are large, so it is a separate module.
package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}

func run(args []string, in io.Reader, out io.Writer) error {
	switch {
	case len(args) == 2 && args[0] == "kustomize":
		return kustomize(args[1], out)
	case len(args) == 3 && args[0] == "helm":
		return helm(args[1], args[2], in, out)
	}
	return fmt.Errorf("usage: render kustomize DIR | render helm CHART NAMESPACE <VALUES")
}

func kustomize(dir string, out io.Writer) error {
	objects, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		return err
	}
	text, err := objects.AsYaml()
	if err != nil {
		return err
	}
	_, err = out.Write(text)
	return err
}

func helm(dir, namespace string, in io.Reader, out io.Writer) error {
	chart, err := loader.LoadDir(dir)
	if err != nil {
		return err
	}
	given, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	values, err := common.ReadValues(given)
	if err != nil {
		return err
	}
	release := common.ReleaseOptions{Name: "fairlead", Namespace: namespace, IsInstall: true}
	values, err = util.ToRenderValues(chart, values, release, common.DefaultCapabilities)
	if err != nil {
		return err
	}
	files, err := engine.Engine{Strict: true}.Render(chart, values)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if text := strings.TrimSpace(files[name]); text != "" && strings.HasSuffix(name, ".yaml") {
			fmt.Fprintf(out, "---\n# %s\n%s\n", name, text)
		}
	}
	return nil
}
