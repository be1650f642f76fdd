package traffic_test

import (
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
)

// unrated makes a host with an uplink that reports no rate, as in virtual machines: a tunnel.
func unrated(t *testing.T) (*host, way) {
	h := newHost(t, 0)
	h.others = map[string]uint64{"vx0": 0}
	box, c := h.tunnelled(false, false)
	return h, way{box: box, c: c, to: "10.69.0.1", at: h.wire}
}

// The uplink's rate is unknown: a ceil, weight and priority hold all the same.
func TestCeilWithoutRate(t *testing.T) {
	h, w := unrated(t)
	h.start()
	before := h.state()
	got, to := h.take(w.at), w.to+":9000"
	h.resolve(w.box, w.at, to)
	first := 0
	mostly(t, h.apply(w.c, policy.Net{Ceil: slow, Weight: 3, Priority: &first}))
	classes := h.classesOf(h.ns, "vx0")
	own, others := classes[h.minor(w.c)], classes[qdisc.MinorDefault]
	if own.ceil != slow || others.ceil <= 100*gbit || own.prio >= others.prio || own.rate <= 2*others.rate {
		t.Errorf("its class is %+v, that of the others %+v", own, others)
	}
	if took := h.held(w.box, to, got); took < heldFor {
		t.Errorf("all came within %v, sooner than the ceil lets them", took)
	}
	for _, row := range h.traffic.Read().Rows {
		if row.Uplink == "vx0" && (row.Link != 0 || row.Guaranteed != 0) {
			t.Errorf("nobody knows the rate, and so there is no guarantee: %+v", row)
		}
	}
	h.removes(before, w.c.ID)
}

// Keys that need the link's rate report that, and how to set it; the others do not.
func TestUnkeptWithoutRate(t *testing.T) {
	h, w := unrated(t)
	h.start()
	apply := func(egress, ingress policy.Net) string {
		t.Helper()
		err := h.traffic.Apply(t.Context(), policy.Target{Container: w.c, Settings: policy.Settings{Egress: egress, Ingress: ingress}})
		if err == nil {
			return ""
		}
		return err.Error()
	}
	for _, tt := range []struct {
		egress, ingress policy.Net
		unkept          string
	}{
		{egress: policy.Net{Rate: mbit, Ceil: slow, Latency: time.Millisecond}, unkept: "uplink vx0: net.rate, net.latency are not kept, "},
		{egress: policy.Net{Ceil: slow}, ingress: policy.Net{Weight: 2, Ceil: slow}, unkept: "uplink vx0: net.ingress.weight is not kept, "},
		{egress: policy.Net{Ceil: slow}, ingress: policy.Net{Ceil: slow}},
	} {
		got := apply(tt.egress, tt.ingress)
		if (got == "") != (tt.unkept == "") || !strings.Contains(got, tt.unkept) || tt.unkept != "" && !strings.Contains(got, "--uplink vx0=1gbit") {
			t.Errorf("%+v, %+v: %q, want %q", tt.egress, tt.ingress, got, tt.unkept)
		}
		if got := h.classesOf(h.ns, "vx0")[h.minor(w.c)].ceil; tt.egress.Rate > 0 && got != slow {
			t.Errorf("%+v: the ceil is %d, want %d", tt.egress, got, slow)
		}
		if tt.ingress.Ceil > 0 {
			if got := h.classesOf(h.ns, "hone")[qdisc.MinorDefault].ceil; got != slow {
				t.Errorf("%+v: the ceil of what it receives is %d, want %d", tt.ingress, got, slow)
			}
		}
	}
	must(t, h.traffic.Remove(t.Context(), w.c.ID))
	if len(h.journal.Entries()) != 0 {
		t.Errorf("in the end: %+v", h.journal.Entries())
	}
}

// A host without hardware, like a container that has containers, has no uplink: only a ceil holds.
func TestCeilWithoutUplink(t *testing.T) {
	needSharing(t)
	h := newHost(t, 0)
	box, c, got := h.limited()
	h.start()
	before := h.state()
	must(t, h.traffic.Apply(t.Context(), policy.Target{Container: c, Settings: policy.Settings{Egress: policy.Net{Ceil: slow}, Ingress: policy.Net{Ceil: slow}}}))
	if took := h.held(box, "10.66.0.3:9000", got); took < heldFor {
		t.Errorf("all came within %v, sooner than the ceil lets them", took)
	}
	rows := h.traffic.Read().Rows
	if len(rows) != 2 || rows[0].Direction == rows[1].Direction || rows[0].Ceil != slow || rows[1].Ceil != slow {
		t.Errorf("rows %+v", rows)
	}
	for _, n := range []policy.Net{{Weight: 1}, {Ceil: slow, Rate: mbit}} {
		if err := h.apply(c, n); err == nil || !strings.Contains(err.Error(), "no uplink") {
			t.Errorf("%+v: %v", n, err)
		}
	}
	h.removes(before, c.ID)
}
