package kubernetes

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
)

// The reasons why a machine cannot have a cluster: modules or programs of the distribution are missing.
var (
	ErrNoModules = errors.New("no network to load the modules of Kubernetes")
	ErrMissing   = errors.New("missing: `test/setup kubernetes` installs it")
)

// Build returns the path of hyperkube, which contains all of Kubernetes and kube-router in one program;
// its first argument selects one. Unless the user's cache has it from the same source and Go, Build
// builds the module in the folder hyperkube, with 4 GB of Go's build cache. Error: ErrNoModules.
func Build(ctx context.Context) (string, error) {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/fairlead-project/fairlead").Output()
	if err != nil {
		return "", fmt.Errorf("find fairlead's source: %w", err)
	}
	dir := filepath.Join(strings.TrimSpace(string(root)), "test/kubernetes/hyperkube")
	sum := sha256.New()
	flags := "-s -w"
	for _, name := range []string{"go.mod", "go.sum", "main.go"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "", err
		}
		if name == "go.mod" {
			release := regexp.MustCompile(`k8s.io/kubernetes v((\d+)\.(\d+)\.\d+)`).FindSubmatch(text)
			if release == nil {
				return "", fmt.Errorf("%s/go.mod names no release of k8s.io/kubernetes", dir)
			}
			for i, variable := range []string{"gitVersion=v", "gitMajor=", "gitMinor="} {
				flags += fmt.Sprintf(" -X k8s.io/component-base/version.%s%s", variable, release[i+1])
			}
		}
		fmt.Fprintf(sum, "%s %d\n%s", name, len(text), text)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	program := filepath.Join(cache, "fairlead", fmt.Sprintf("hyperkube-%s-%x", runtime.Version(), sum.Sum(nil)[:8]))
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	fmt.Fprintln(os.Stderr, "building Kubernetes, once: five minutes of two idle CPUs")
	fresh := fmt.Sprintf("%s.%d", program, os.Getpid())
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", flags, "-o", fresh, ".")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		if strings.Contains(string(text), "dial tcp") || strings.Contains(string(text), "no such host") {
			return "", ErrNoModules
		}
		return "", fmt.Errorf("build hyperkube: %w\n%s", err, text)
	}
	return program, os.Rename(fresh, program)
}
