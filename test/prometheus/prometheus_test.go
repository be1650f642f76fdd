// Package prometheus checks packaging/prometheus without an agent: the rules and the scrape
// configuration must be valid, the rules' unit tests must pass, and the operator's form must have
// the same rules. test/e2e checks a real Prometheus with a real agent.
package prometheus

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

var update = flag.Bool("update", false, "write prometheusrule.yaml anew")

const dir = "../../packaging/prometheus"

// promtool runs promtool on files of the folder, or on files with an absolute path.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	path, err := exec.LookPath("promtool")
	if err != nil {
		testkit.Skip(t, "no promtool")
	}
	cmd := exec.Command(path, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, name))
	testkit.Must(t, err)
	return string(text)
}

func TestRules(t *testing.T) {
	promtool(t, "check", "rules", "rules.yml")
	promtool(t, "test", "rules", "tests.yml")
}

// TestScrape checks the configuration with static targets, as Debian's Prometheus is built without
// Kubernetes.
func TestScrape(t *testing.T) {
	static := strings.Replace(read(t, "scrape.yml"), "kubernetes_sd_configs: [{role: pod, namespaces: {names: [fairlead-system]}}]", "static_configs: [{targets: [a]}]", 1)
	rules, err := filepath.Abs(filepath.Join(dir, "rules.yml"))
	testkit.Must(t, err)
	static = strings.Replace(static, "rule_files: [rules.yml]", "rule_files: ["+rules+"]", 1)
	path := filepath.Join(t.TempDir(), "prometheus.yml")
	testkit.Must(t, os.WriteFile(filepath.Join(filepath.Dir(path), "fairlead-token"), []byte("x"), 0o644))
	testkit.Must(t, os.WriteFile(path, []byte(static), 0o644))
	if !strings.Contains(static, "static_configs") || !strings.Contains(static, rules) {
		t.Fatalf("not replaced:\n%s", static)
	}
	promtool(t, "check", "config", path)
}

func TestOperator(t *testing.T) {
	const head = `# Made from rules.yml, for the Prometheus operator: go test ./test/prometheus -update. Its Prometheus
# must select it: many want a label such as ` + "`release: NAME`" + ` here.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: fairlead
spec:
`
	_, groups, ok := strings.Cut(read(t, "rules.yml"), "\ngroups:\n")
	if !ok {
		t.Fatal("no groups in rules.yml")
	}
	want := head + "  groups:\n"
	for line := range strings.Lines(groups) {
		if line != "\n" {
			line = "  " + line
		}
		want += line
	}
	if *update {
		testkit.Must(t, os.WriteFile(filepath.Join(dir, "prometheusrule.yaml"), []byte(want), 0o644))
	}
	if read(t, "prometheusrule.yaml") != want {
		t.Error("prometheusrule.yaml is not made from rules.yml: go test ./test/prometheus -update")
	}
}
