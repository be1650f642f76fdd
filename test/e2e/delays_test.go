package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

const delayMetric = "fairlead_traffic_delay_seconds"

// delaysOf returns the histogram of a container at nic0, nil if there is none.
func (a *agent) delaysOf(name string) *dto.Histogram {
	a.t.Helper()
	for _, m := range a.metrics()[delayMetric].GetMetric() {
		labels := make(map[string]string)
		for _, l := range m.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		if labels["container"] == name && labels["device"] == "nic0" && labels["direction"] == "egress" {
			return m.GetHistogram()
		}
	}
	return nil
}

// TestDelayMetrics has the agent time packets always, or not, as its config file says, while a user
// asks by the command line as well.
func TestDelayMetrics(t *testing.T) {
	r := newRig(t)
	box := r.add(sandbox.Spec{Name: "e2e-delay", Labels: map[string]string{"fairlead.net.weight": "2"}})
	a := newAgent(t, r.host, "--sandbox-dir", r.sandboxes.Dir(), "--uplink", "nic0=1gbit")
	// sends has the container send packets to the wire, and waits until they are answered.
	sends := func(n int) {
		t.Helper()
		p, err := box.Start(exec.Command("busybox", "ping", "-c", fmt.Sprint(n), "-i", "0.02", "10.66.0.1"))
		must(t, err)
		ends(t, p.PID, p.Done())
		must(t, p.Wait())
	}

	a.start()
	a.trafficOf("e2e-delay", api.StateDone, "")
	if f := a.metrics()[delayMetric]; f != nil {
		t.Errorf("nobody asked for it: %v", f)
	}
	a.stop()

	must(t, os.WriteFile(a.path("config.yaml"), []byte("traffic-delays: sometimes\n"), 0o644))
	mustSay(t, fairlead(t, "agent", "--config", a.path("config.yaml")), 1, "config.yaml:1: traffic-delays", `"sometimes"`)
	must(t, os.WriteFile(a.path("config.yaml"), []byte("traffic-delays: true\n"), 0o644))
	a.start()
	a.trafficOf("e2e-delay", api.StateDone, "")
	sends(20)
	first := a.delaysOf("e2e-delay")
	if first.GetSampleCount() < 20 || first.GetSampleSum() <= 0 || first.GetSampleSum() > float64(first.GetSampleCount()) || len(first.GetBucket()) < 10 {
		t.Fatalf("after 20 pings: %v", first)
	}
	asked := make(chan output)
	go func() { asked <- a.run("traffic", "e2e-delay", "--interval", "2s") }()
	var o output
	for done := false; !done; { // packets leave during its interval, whenever that is
		sends(50)
		select {
		case o = <-asked:
			done = true
		default:
		}
	}
	mustSay(t, o, 0, "P99.9", "nic0, from containers")
	_, line, _ := strings.Cut(o.out, "e2e-delay")
	line, _, _ = strings.Cut(line, "\n")
	if !strings.Contains(line, "us") && !strings.Contains(line, "ms") {
		t.Errorf("no delays beside the metrics: %v", o)
	}
	mustSay(t, a.run("traffic", "--total"), 0, "P99.9")
	if second := a.delaysOf("e2e-delay"); second.GetSampleCount() < first.GetSampleCount()+50 {
		t.Errorf("after 50 more pings: %v", second)
	}
	if missed := a.metrics()["fairlead_traffic_delay_missed_packets_total"].GetMetric(); len(missed) != 1 || missed[0].GetCounter().GetValue() != 0 {
		t.Errorf("missed: %v", missed)
	}
	mustSay(t, a.run("set", "e2e-delay", "net.weight=4"), 0)
	if again := a.delaysOf("e2e-delay"); again.GetSampleCount() < first.GetSampleCount()+50 {
		t.Errorf("another weight, and it begins anew: %v", again)
	}
	a.stop()
}
