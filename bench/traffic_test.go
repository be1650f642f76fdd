package bench

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/bench/report"
	"github.com/fairlead-project/fairlead/bench/rig"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// Every case is one that can be measured: whom it names is there, what policy
// says of it is policy, and no peer is given what the link does not have.
func TestTrafficCatalogue(t *testing.T) {
	names, err := TrafficCases(Options{})
	if err != nil || len(names) != 47 {
		t.Errorf("%d cases (%v)", len(names), err)
	}
	quick, err := TrafficCases(Options{Quick: true})
	if err != nil || len(quick) == 0 || len(quick) >= len(names) {
		t.Errorf("%d quick cases (%v)", len(quick), err)
	}
	if _, err := TrafficCases(Options{Only: "^none$"}); err == nil {
		t.Error("a case that there is not is measured")
	}
	for _, su := range trafficCatalogue() {
		link := su.link
		if link == 0 {
			link = 100 * gbit
		}
		for _, c := range su.cases {
			who := append([]string{}, c.probe, c.fixed)
			for _, s := range c.send {
				who = append(who, s.name, s.to)
			}
			for name := range c.set {
				who = append(who, name)
			}
			for _, p := range c.phases {
				who = append(who, p.sends...)
				sum := 0.0
				for name, due := range p.due {
					who, sum = append(who, name), sum+due
				}
				if sum < 0.99 || sum > 1.01 {
					t.Errorf("%s %s %s: the shares add up to %v", su.name, c.name, p.name, sum)
				}
			}
			for _, name := range who {
				if name != "" && su.box(name) < 0 {
					t.Errorf("%s %s: there is no %s", su.name, c.name, name)
				}
			}
			var sum uint64
			for _, class := range c.tc {
				sum += class.Rate
			}
			if sum > link || len(c.tc) > len(su.boxes) || len(c.cni) > len(su.boxes) {
				t.Errorf("%s %s: tc is given %d bit/s of %d", su.name, c.name, sum, link)
			}
		}
	}
}

// A short run of the real thing: a weight is kept, also in an overlay, where
// filters by address find nobody.
func TestTraffic(t *testing.T) {
	testkit.NeedRoot(t)
	for range 4 { // others may keep a CPU from a sender for a while
		alone(t)()
		r, err := Traffic(t.Context(), Options{Only: "^overlay 6 to 1$", Rounds: 2, Window: 500 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		c, ok := r.Find("overlay 6 to 1", ShareOf+"one")
		if !ok || len(c.Off) != 2 || len(c.On) != 2 || len(c.Peers["tc"]) != 2 {
			t.Fatalf("report %+v", r.Cases)
		}
		if rig.CNIPlugin() == "" && !slices.ContainsFunc(r.Env.Notes, func(n string) bool { return strings.Contains(n, "containernetworking-plugins") }) {
			t.Errorf("the plugin is not there, and the notes are %q", r.Env.Notes)
		}
		clean(t)
		off, on := report.Median(c.Off), report.Median(c.On)
		total, _ := r.Find("overlay 6 to 1", Total)
		if report.Median(total.On) >= 0.7*gbit && on >= 0.4 && on <= 0.6 && off <= 0.8*on {
			return
		}
		t.Logf("one connection beside six has %.2f of %.0f bit/s, without protection %.2f", on, report.Median(total.On), off)
	}
	t.Error("it is never the half of the link that is its due")
}

// Requests do not wait behind another's super-packets, and it is the queue of the
// NIC that says so: aside there is none, with or without protection.
func TestTrafficDelays(t *testing.T) {
	testkit.NeedRoot(t)
	alone(t)()
	const name = "overlay requests beside super-packets"
	r, err := Traffic(t.Context(), Options{Only: "^(" + name + "|overlay ceil)$", Rounds: 1, Window: 500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	for metric, tenth := range map[string]bool{QueueP99: true, P50: true, AsideP99: false} {
		c, ok := r.Find(name, metric)
		if !ok || len(c.Off) != 1 || len(c.On) != 1 || c.On[0] <= 0 {
			t.Errorf("%s: %+v", metric, c)
		} else if tenth && c.On[0] > c.Off[0]/10 {
			t.Errorf("%s is %v with protection, %v without", metric, c.On[0], c.Off[0])
		}
	}
	for _, metric := range []string{FirstSecond, WorstSecond} {
		if c, ok := r.Find("overlay ceil", metric); !ok || c.On[0] <= 0.1 || c.On[0] > c.Off[0]/2 {
			t.Errorf("%s: %+v", metric, c)
		}
	}
	clean(t)
}

// What the CNI plugin makes goes with it.
func TestCNIBandwidth(t *testing.T) {
	testkit.NeedRoot(t)
	if rig.CNIPlugin() == "" {
		testkit.Skip(t, "no CNI plugin bandwidth")
	}
	r, err := rig.New(rig.Config{Path: rig.NIC})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}()
	devices := func() (names []string) {
		if err := r.Node.Do(func() error {
			dirs, err := exec.Command("ip", "-o", "link").Output()
			for line := range strings.Lines(string(dirs)) {
				names = append(names, strings.Fields(line)[1])
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return names
	}
	before := devices()
	if err := r.CNIBandwidth(1, 50*mbit); err != nil {
		t.Fatal(err)
	}
	if during := devices(); len(during) != len(before)+1 {
		t.Errorf("devices %q, were %q", during, before)
	}
	if err := r.CNIBandwidth(1, 0); err != nil {
		t.Fatal(err)
	}
	if after := devices(); !slices.Equal(after, before) {
		t.Errorf("devices %q, were %q", after, before)
	}
}
