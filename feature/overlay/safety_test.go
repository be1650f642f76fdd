package overlay

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// slowFor checks that a stream is answered n times, by no fast packet of a node.
func (n *node) slowFor(t testing.TB, s *stream, times int) {
	t.Helper()
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	before := n.fastCount(t)
	for range times {
		s.calls(t)
	}
	if now := n.fastCount(t); now > before {
		t.Errorf("%d packets were fast", now-before)
	}
}

// A feature that hangs no longer renews learnt entries: all packets become slow, and no connection
// breaks. When it continues, they are fast again.
func TestHangs(t *testing.T) {
	testkit.InFull(t)
	testkit.Later(t)
	t.Parallel()
	r := newRig(t, routed)
	r.onTracked()
	echo(t, r.nodes[1].web)
	d, s := dial(t, r.nodes[0].web, "tcp", r.nodes[1].addr), newStream(t, r.nodes[0].web, r.nodes[1].addr)
	r.fast(d, 100)
	r.quick(s)
	n := r.nodes[0]
	func() {
		n.f.mu.Lock()
		defer n.f.mu.Unlock()
		both := func() {
			t.Helper()
			d.ask(t, 100)
			s.calls(t)
		}
		for began := time.Now(); time.Since(began) < patience+vouched+lease+coarse; {
			both()
		}
		fast := n.fastCount(t)
		for range 100 {
			both()
		}
		if now := n.fastCount(t); now > fast {
			t.Errorf("%d packets were fast that nobody vouched for", now-fast)
		}
	}()
	r.fast(d, 100)
	r.quick(s)
}

// fastCount returns the number of fast packets of a node. The caller holds the feature's lock.
func (n *node) fastCount(t testing.TB) (sum uint64) {
	t.Helper()
	for _, o := range n.f.force {
		var counts []overlayCounts
		must(t, n.f.cache.maps.FlOvCounts.Lookup(o.number, &counts))
		for _, c := range counts {
			sum += c.Packets[in][fastPath] + c.Packets[out][fastPath]
		}
	}
	return sum
}

// The kill switch makes all packets of a network slow at once, until it is turned back, also for
// the next agent.
func TestKillSwitch(t *testing.T) {
	testkit.InFull(t)
	r := newRig(t, routed)
	n := r.nodes[0]
	n.f.cfg.Killed = filepath.Join(t.TempDir(), "killed")
	r.on()
	newSink(t, r.nodes[1].web)
	s := newStream(t, r.nodes[0].web, r.nodes[1].addr)
	r.quick(s)
	turn := func(kill bool) api.OverlayNetwork {
		t.Helper()
		got, err := n.f.Command(t.Context(), nil, api.Ask{Feature: "overlay", Body: api.OverlaySwitch{Network: "vx0", Kill: kill, By: "somebody"}})
		must(t, err)
		return got.(api.OverlayNetwork)
	}
	if w := turn(true); w.State != api.OverlayKilled {
		t.Errorf("killed: %+v", w)
	}
	n.slowFor(t, s, 20)
	testkit.Fails(t, "applied while killed", n.apply(t, true), "somebody")
	n.told(t, "link", func() { r.mtu(n, 1400) }) // a round does not change that
	n.slowFor(t, s, 20)

	must(t, n.f.Close()) // the next agent
	n.begin(t, n.f.cfg.Killed)
	testkit.Fails(t, "applied by the next agent", n.apply(t, true), "somebody")
	n.slowFor(t, s, 20)
	if w := turn(false); w.State != api.OverlayOn {
		t.Errorf("revived: %+v", w)
	}
	must(t, n.apply(t, true))
	r.quick(s)
	if data, err := os.ReadFile(n.f.cfg.Killed); err != nil || strings.Contains(string(data), "vx0") {
		t.Errorf("the file says %q: %v", data, err)
	}
}
