package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// metrics reads and parses the agent's page.
func (a *agent) metrics() map[string]*dto.MetricFamily {
	a.t.Helper()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
			err = a.ns.Do(func() error { c, err = new(net.Dialer).DialContext(ctx, network, addr); return err })
			return c, err
		},
	}}
	resp, err := client.Get("http://" + metricsAddr + "/metrics")
	must(a.t, err)
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	must(a.t, err)
	if resp.StatusCode != http.StatusOK {
		a.t.Fatalf("metrics: %s\n%s", resp.Status, page)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	if err != nil {
		a.t.Fatalf("metrics page: %v\n%s", err, page)
	}
	return families
}

// series counts the series of a family that are about a container. It returns -1 if another label
// is wrong.
func series(f *dto.MetricFamily, name, id string) (n int) {
	for _, m := range f.GetMetric() {
		labels := make(map[string]string)
		for _, l := range m.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		if labels["container"] == name && labels["id"] == id {
			n++
		}
	}
	return n
}

func (h *host) testMetrics(t *testing.T) {
	defer h.with(t)()
	h.sleeper(t, "measured", "--label", isolate)
	i := h.agent.isolated("measured", 1)
	families := h.agent.metrics()
	for _, name := range []string{"fairlead_netcpu_isolated", "fairlead_netcpu_kthread_seconds_total", "fairlead_netcpu_early_dropped_packets_total"} {
		if n := series(families[name], "measured", i.ID.String()); n != 1 {
			t.Errorf("%s: %d series of the container, want 1: %v", name, n, families[name])
		}
	}
	for _, name := range []string{"fairlead_build_info", "fairlead_agent_containers", "fairlead_agent_journal_changes", "fairlead_bpf_map_entries", "process_resident_memory_bytes"} {
		if families[name] == nil {
			t.Errorf("no %s", name)
		}
	}
	h.remove(t, "measured")
	h.agent.forgets(i)
	await(t, "its series to end", func() error {
		for name, f := range h.agent.metrics() {
			if n := series(f, "measured", i.ID.String()); n != 0 {
				return fmt.Errorf("%s: %d series", name, n)
			}
		}
		return nil
	})
	h.agent.rests()
}
