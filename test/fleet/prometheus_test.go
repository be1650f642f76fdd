package fleet

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// prometheus starts a Prometheus that scrapes both nodes, with the rules of packaging/prometheus. It
// returns a function that asks for the labels of the first series of a query.
func (f *fleet) prometheus(t *testing.T) func(query string) (map[string]string, error) {
	t.Helper()
	rules, err := filepath.Abs(filepath.Join(root, "packaging/prometheus/rules.yml"))
	testkit.Must(t, err)
	dir := t.TempDir()
	config := fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%q]\nscrape_configs:\n- job_name: fairlead\n  honor_labels: true\n  authorization: {credentials: fleet}\n  static_configs:\n", rules)
	for _, n := range f.Nodes {
		config += fmt.Sprintf("  - {targets: [%q], labels: {node: %s}}\n", n.Address+":9643", n.Name)
	}
	testkit.Must(t, os.WriteFile(filepath.Join(dir, "prometheus.yml"), []byte(config), 0o644))
	cmd := f.Command(t.Context(), "prometheus", "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address=127.0.0.1:9090")
	var log strings.Builder
	cmd.Stderr = &log
	testkit.Must(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Signal(unix.SIGTERM)
		cmd.Wait()
		if t.Failed() {
			t.Logf("log of Prometheus:\n%s", &log)
		}
	})
	return func(query string) (map[string]string, error) {
		out, err := f.Command(t.Context(), "promtool", "query", "--format=json", "instant", "http://127.0.0.1:9090", query).Output()
		if err != nil {
			if exit, ok := err.(*exec.ExitError); ok {
				err = fmt.Errorf("%w: %s", err, exit.Stderr)
			}
			return nil, err
		}
		var series []struct {
			Metric map[string]string `json:"metric"`
		}
		if err := json.Unmarshal(out, &series); err != nil {
			return nil, err
		}
		if len(series) == 0 {
			return nil, fmt.Errorf("%s has no series", query)
		}
		return series[0].Metric, nil
	}
}
