package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// prometheus is a real Prometheus in a network namespace, which scrapes the agent there.
type prometheus struct {
	t    *testing.T
	http http.Client
}

const prometheusAddr = "127.0.0.1:9090"

// newPrometheus starts a Prometheus with the rules of packaging/prometheus and the shortest intervals.
func newPrometheus(t *testing.T, ns netns) *prometheus {
	t.Helper()
	path, err := exec.LookPath("prometheus")
	if err != nil {
		testkit.Skip(t, "no prometheus")
	}
	dir := t.TempDir()
	rules, err := filepath.Abs("../../packaging/prometheus/rules.yml")
	must(t, err)
	config := fmt.Sprintf(`
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs:
  - job_name: fairlead
    honor_labels: true
    static_configs: [{targets: [%q], labels: {node: n1}}]
`, rules, metricsAddr)
	must(t, os.WriteFile(filepath.Join(dir, "prometheus.yml"), []byte(config), 0o644))
	cmd := exec.Command(path, "--config.file="+dir+"/prometheus.yml", "--storage.tsdb.path="+dir+"/data", "--web.listen-address="+prometheusAddr, "--log.level=warn")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	ended := startIn(t, ns, cmd, new(error))
	t.Cleanup(func() { cmd.Process.Kill(); ends(t, cmd.Process.Pid, ended) })
	p := &prometheus{t, http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
			err = ns.Do(func() error { c, err = new(net.Dialer).DialContext(ctx, network, addr); return err })
			return c, err
		},
	}}}
	await(t, "Prometheus", func() error { return p.get("label/__name__/values", nil, new([]string)) })
	return p
}

// get requests data from the HTTP API.
func (p *prometheus) get(path string, ask url.Values, data any) error {
	resp, err := p.http.Get("http://" + prometheusAddr + "/api/v1/" + path + "?" + ask.Encode())
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	answer := struct {
		Error string
		Data  any
	}{Data: data}
	if err := json.Unmarshal(body, &answer); err != nil {
		return fmt.Errorf("%s: %w: %s", resp.Status, err, body)
	}
	if answer.Error != "" {
		return errors.New(answer.Error)
	}
	return nil
}

// query returns the labels of an expression's samples.
func (p *prometheus) query(expr string) (found []map[string]string, err error) {
	var data struct {
		Result []struct{ Metric map[string]string }
	}
	err = p.get("query", url.Values{"query": {expr}}, &data)
	for _, r := range data.Result {
		found = append(found, r.Metric)
	}
	return found, err
}

// panels returns the expressions of the dashboards by their place, with values for their variables.
// The rig's containers belong to no pod.
func panels(t *testing.T) map[string]string {
	t.Helper()
	values := strings.NewReplacer("$namespace/$pod/", "", "$namespace", "", "$pod", "", `=~"$node"`, `=~".*"`, "$node", "n1", "$__rate_interval", "10s")
	files, err := filepath.Glob("../../packaging/grafana/*.json")
	must(t, err)
	found, titles := make(map[string]string), make(map[string]bool)
	for _, path := range files {
		text, err := os.ReadFile(path)
		must(t, err)
		var board struct {
			UID, Title string
			Panels     []struct {
				Title   string
				Targets []struct{ RefID, Expr string }
			}
		}
		if err := json.Unmarshal(text, &board); err != nil || titles[board.UID] || titles[board.Title] {
			t.Errorf("%s: %v, %q, %q", path, err, board.UID, board.Title)
		}
		titles[board.UID], titles[board.Title] = true, true
		for _, p := range board.Panels {
			for _, x := range p.Targets {
				expr := values.Replace(x.Expr)
				if strings.Contains(expr, "$") {
					t.Errorf("%s: %s: a variable without a value: %s", path, p.Title, expr)
				}
				found[board.Title+": "+p.Title+" "+x.RefID] = expr
			}
		}
	}
	return found
}

// seriesName matches the agent's metrics in a text.
var seriesName = regexp.MustCompile(`\bfairlead_[a-z0-9_]+`)

// TestPrometheus makes a real Prometheus scrape an agent, while a flood slows a victim and each
// kind of policy is in force. The rules must name the flood as the first culprit, each panel of the
// dashboards must show something, and each metric in rules and dashboards must exist. Then the
// agent stops answering.
func TestPrometheus(t *testing.T) {
	r := newRig(t)
	p := newPrometheus(t, r.host)
	disk := testkit.NewDisk(t, 1<<20)
	flood := r.add(sandbox.Spec{Name: "e2e-flooding"})
	victim := r.add(sandbox.Spec{Name: "e2e-flooded", Labels: map[string]string{"fairlead.io.reserve": disk.Path + " riops=100", "fairlead.net.rate": "1mbit", "fairlead.net.ceil": "50mbit"}})
	// The victim's CPU handles the packets, not the sender's.
	must(t, r.host.SetQueues("nic0", "rx", "rps_cpus", func(int) string { return "1" }))
	a := r.agent()
	a.flags = append(a.flags, "--uplink", "nic0=1gbit")
	a.start()
	for _, b := range r.boxes {
		a.stands(b.Name, "netcpu", api.StateDone)
	}
	mustSay(t, a.run("io", "capacity", disk.Path, "riops=1000", "wiops=1000"), 0, "1.00kr 1.00kw")
	for _, end := range []func(){
		generate(t, flood, 0, "udp-recv"),
		generate(t, victim, 0, "burn"),
		generate(t, r.wire, 1, "udp-send", "--to", "10.66.1.1:9000", "--rate", "50000"),
	} {
		defer end()
	}

	await(t, "the flood to be the first culprit", func() error {
		for _, expr := range []string{`topk(1, fairlead:culprit:slowed:avg5m)`, `topk(1, fairlead:slowed_by:avg5m{container="e2e-flooded", node="n1", culprit_id!=""})`} {
			if found, err := p.query(expr); err != nil || len(found) != 1 || found[0]["culprit"] != "e2e-flooding" {
				return fmt.Errorf("%s: %v, %v", expr, found, err)
			}
		}
		return nil
	})
	exprs := panels(t)
	rules, err := os.ReadFile("../../packaging/prometheus/rules.yml")
	must(t, err)
	named := seriesName.FindAllString(string(rules), -1)
	for _, expr := range exprs {
		named = append(named, seriesName.FindAllString(expr, -1)...)
	}
	if len(exprs) < 30 || len(named) < 30 {
		t.Fatalf("%d expressions, %d metrics", len(exprs), len(named))
	}
	await(t, "all metrics", func() error {
		var known []string
		if err := p.get("label/__name__/values", nil, &known); err != nil {
			return err
		}
		for _, name := range named {
			if !slices.Contains(known, name) {
				return fmt.Errorf("the agent has no %s", name)
			}
		}
		return nil
	})
	await(t, "all panels", func() error {
		for at, expr := range exprs {
			if found, err := p.query(expr); err != nil || len(found) == 0 {
				return fmt.Errorf("%s shows nothing: %s: %v", at, expr, err)
			}
		}
		return nil
	})

	a.stop()
	await(t, "the alert", func() error {
		found, err := p.query(`ALERTS{alertname="FairleadAgentDown", node="n1"}`)
		if err == nil && len(found) == 0 {
			err = errors.New("there is none")
		}
		return err
	})
	var data struct {
		Groups []struct {
			Rules []struct{ Name, LastError string }
		}
	}
	must(t, p.get("rules", nil, &data))
	if len(data.Groups) == 0 {
		t.Error("no rules")
	}
	for _, g := range data.Groups {
		for _, rule := range g.Rules {
			testkit.Same(t, rule.Name, "", rule.LastError)
		}
	}
}
