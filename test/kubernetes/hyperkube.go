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

// ErrNoModules means that the modules of Kubernetes are not there and cannot be loaded.
var ErrNoModules = errors.New("no network to load the modules of Kubernetes")

// Build returns the path of hyperkube, which is all of Kubernetes in one program, chosen by its
// first argument. Unless the user's cache has one of the same source and Go, it builds the module in
// the folder hyperkube, with 4 GB of Go's build cache. Error: ErrNoModules.
func Build(ctx context.Context) (string, error) {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/fairlead-project/fairlead").Output()
	if err != nil {
		return "", fmt.Errorf("find fairlead's source: %w", err)
	}
	dir := filepath.Join(strings.TrimSpace(string(root)), "test/kubernetes/hyperkube")
	sum := sha256.New()
	var version []byte
	for _, name := range []string{"go.mod", "go.sum", "main.go"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "", err
		}
		if name == "go.mod" {
			version = regexp.MustCompile(`k8s.io/kubernetes v[0-9.]+`).Find(text)
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
	release := strings.TrimPrefix(string(version), "k8s.io/kubernetes v")
	number := strings.SplitN(release, ".", 3)
	if len(number) != 3 {
		return "", fmt.Errorf("%s/go.mod names no release of k8s.io/kubernetes", dir)
	}
	const versions = "k8s.io/component-base/version."
	flags := fmt.Sprintf("-s -w -X %sgitVersion=v%s -X %sgitMajor=%s -X %sgitMinor=%s", versions, release, versions, number[0], versions, number[1])
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
