package isolate

import (
	"slices"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

const fifth = time.Second / 5

// busy has requests come in while all CPUs compute.
var busy = restWindow{length: fifth, ran: fifth / 5, single: 5000, super: 10}

// No thread polls an uplink while it rests. Threads do so again after that, and without the agent.
func TestUplinksRest(t *testing.T) {
	is, ns, index, path := bare(t)
	who, err := identity.Open("/proc")
	must(t, err)
	defer who.Close()
	is.cfg.Drop, err = drop.Load(drop.Config{Feature: "netcpu", Identity: who, Ends: hook.Open("/proc", is.cfg.Journal)})
	must(t, err)
	defer is.cfg.Drop.Close()
	must(t, ns.Offload(index, netdev.GRO).Write(netdev.GRO.On()))
	key := container.Device{NetNS: ns.Inode(), Index: index}
	group := testkit.Cgroup(t).CPU
	claim := func() {
		t.Helper()
		is.host = &uplinks{at: place{group: group, cpuset: is.cfg.Layout.CPUSet}, devices: make(map[container.Device]*uplinkDevice)}
		must(t, is.claim(uplink.Uplink{Key: key, Link: netdev.Link{Index: index, Name: "fltb"}, NS: ns, Path: path}))
	}
	polled := func(when, want string, threads int) {
		t.Helper()
		testkit.Gives(t, when, want)(ns.Threaded(index).Read())
		noted := slices.ContainsFunc(is.cfg.Journal.Entries(), func(e journal.Entry) bool { return e.Ref.Kind == netdev.KindThreaded })
		if u := is.host.devices[key]; len(u.threads) != threads || noted != (threads > 0) {
			t.Errorf("%s: threads %v, noted %t", when, u.threads, noted)
		}
	}
	rests := func(when string) {
		t.Helper()
		for range 25 {
			must(t, is.rest(busy))
		}
		polled(when, "0", 0)
	}
	claim()
	polled("at first", "1", 1)
	rests("at rest")
	must(t, is.RenewUplinks(true))
	claim()
	polled("claimed at rest", "0", 0)
	flood := busy
	flood.flood = true
	must(t, is.rest(flood))
	polled("in a flood", "1", 1)
	rests("after the flood")
	now := time.Now()
	must(t, is.pace(now))
	must(t, is.pace(now.Add(2*time.Second)))
	polled("as time is left", "1", 1)
	rests("without time again")
	must(t, is.Close())
	polled("after the agent", "1", 1)
	must(t, is.releaseUplinks())
	testkit.Gives(t, "without an agent", "0")(ns.Threaded(index).Read())
	testkit.None(t, "journal", is.cfg.Journal.Entries())
}

func TestRestControl(t *testing.T) {
	with := func(change func(*restWindow)) restWindow {
		w := busy
		change(&w)
		return w
	}
	flood := with(func(w *restWindow) { w.flood = true })
	owned := with(func(w *restWindow) { w.owned = true })
	idle := with(func(w *restWindow) { w.idle = fifth / 5 })
	little := with(func(w *restWindow) { w.idle = fifth / 10 })
	light := with(func(w *restWindow) { w.ran = 0 })
	bulk := with(func(w *restWindow) { w.single, w.super = 10, 1000 })
	type step struct {
		w    restWindow
		n    int
		want bool // after the last
	}
	for _, c := range []struct {
		name  string
		steps []step
	}{
		{"after five seconds without idle time", []step{{busy, 24, false}, {busy, 1, true}}},
		{"an idle CPU takes the threads", []step{{idle, 100, false}}},
		{"also a little idle time, at first", []step{{little, 100, false}}},
		{"but not enough to end a rest", []step{{busy, 25, true}, {little, 100, true}}},
		{"which more does within a second", []step{{busy, 25, true}, {idle, 4, true}, {idle, 1, false}}},
		{"light work", []step{{light, 100, false}}},
		{"bulk", []step{{bulk, 100, false}}},
		{"bulk just before", []step{{busy, 20, false}, {bulk, 5, false}, {busy, 24, false}, {busy, 1, true}}},
		{"a flood", []step{{flood, 100, false}}},
		{"a flood ends a rest at once", []step{{busy, 25, true}, {flood, 1, false}, {busy, 24, false}}},
		{"so does an owner", []step{{busy, 25, true}, {owned, 1, false}}},
		{"an owner", []step{{owned, 100, false}}},
		{"and bulk, within a second", []step{{busy, 25, true}, {bulk, 4, true}, {bulk, 1, false}}},
		{"resting uplinks do nothing", []step{{busy, 25, true}, {light, 100, true}}},
		{"a minute", []step{{busy, 25, true}, {busy, 299, true}, {busy, 1, false}}},
	} {
		var ctl restControl
		for i, s := range c.steps {
			got := false
			for range s.n {
				got = ctl.next(s.w)
			}
			if got != s.want {
				t.Errorf("%s: step %d: rests %t, want %t", c.name, i, got, s.want)
			}
		}
	}
}
