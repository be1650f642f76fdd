package traffic_test

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// examined returns the feature's finding for an uplink.
func (h *host) examined(device string) probe.Finding {
	h.t.Helper()
	for _, f := range h.traffic.Examine() {
		if f.Capability == device {
			return f
		}
	}
	h.t.Fatalf("nothing of %s: %+v", device, h.traffic.Examine())
	return probe.Finding{}
}

// Each uplink has a line with the source of its rate.
func TestRateComesFrom(t *testing.T) {
	h := newHost(t, gbit)
	h.others = map[string]uint64{"vx0": 0, "nic7": 0}
	h.tunnelled(false, false)
	h.start()
	if f := h.examined("nic0"); f.Level != probe.Full || f.Detail != "1gbit, as the operator says" {
		t.Errorf("%+v", f)
	}
	if f := h.examined("vx0"); f.Level != probe.Degraded || !strings.Contains(f.Why, "not known") || !strings.Contains(f.Mend, "--uplink vx0=1gbit") || !strings.Contains(f.Mend, "calibrate") {
		t.Errorf("%+v", f)
	}
	if f := h.examined("nic7"); f.Level != probe.Unavailable {
		t.Errorf("%+v", f)
	}
	must(t, h.traffic.Close())
	h.rate, h.others = 0, map[string]uint64{"nic0": 0}
	must(t, h.journal.Close())
	h.start()
	if f := h.examined("nic0"); f.Level != probe.Full || f.Detail != "10gbit, as its driver says" { // as for each veth
		t.Errorf("%+v", f)
	}
}

// A measurement counts if the driver reports no rate, and changes nothing else.
func TestCalibrate(t *testing.T) {
	h, w := unrated(t)
	h.Address(h.ns, "br0", "10.69.0.254/24")
	h.run(h.wire, "tcp-recv", "--listen", ":9002")
	h.measured = filepath.Join(t.TempDir(), "state", "rates.json")
	h.start()
	before := h.state()
	calibrate := func(to string, over time.Duration) (device string, c traffic.Calibrated, err error) {
		must(t, h.ns.Do(func() error {
			device, c, err = traffic.Calibrate(t.Context(), traffic.Config{
				Roots: kernel.Default(), NetNS: h.ns.NetNS(), Uplinks: h.others, Measured: h.measured,
			}, to, over)
			return nil
		}))
		return device, c, err
	}
	for to, over := range map[string]time.Duration{"10.69.0.1:9002": time.Minute, "10.69.0.1:9": time.Second} {
		if device, c, err := calibrate(to, over); err == nil {
			t.Errorf("to %s for %v: %s %+v", to, over, device, c)
		}
	}
	start := time.Now()
	device, c, err := calibrate("10.69.0.1:9002", 2*time.Second)
	must(t, err)
	if device != "vx0" || c.Rate == 0 || c.To != "10.69.0.1:9002" || time.Since(start) > time.Minute {
		t.Errorf("%s %+v after %v", device, c, time.Since(start))
	}
	t.Logf("%+v", c)
	if after := h.state(); after != before {
		t.Errorf("before:\n%safter:\n%s", before, after)
	}
	if f := h.examined("vx0"); f.Level != probe.Full || !strings.Contains(f.Detail, "as it was measured to 10.69.0.1:9002 on 2") {
		t.Errorf("%+v", f)
	}
	must(t, h.apply(w.c, policy.Net{Rate: c.Rate / 2}))
	if i := rowOf(h.traffic.Read().Rows, "vx0"); i < 0 || h.traffic.Read().Rows[i].Link != c.Rate {
		t.Errorf("rows %+v", h.traffic.Read().Rows)
	}
	// What our own shaper lets through is no measurement.
	if device, c, err := calibrate("10.69.0.1:9002", time.Second); err == nil || !strings.Contains(err.Error(), "stop it first") {
		t.Errorf("%s %+v, %v", device, c, err)
	}
	// Another device of that name has another rate.
	must(t, h.traffic.Remove(t.Context(), w.c.ID))
	must(t, h.ns.Delete("vx0"))
	h.Tunnel(h.ns, "", "10.66.0.1", sandbox.End{Box: h.ns})
	if f := h.examined("vx0"); f.Level != probe.Degraded {
		t.Errorf("%+v", f)
	}
}
