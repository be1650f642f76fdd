package latency

import (
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

// unwired makes a feature that records one container, of slot 3, and has nothing in the kernel.
func unwired() *Latency {
	f := &Latency{
		cfg: Config{Host: feature.Host{Log: slog.New(slog.DiscardHandler)}}, host: new(netdev.NS), tracer: newTraces(), spells: make(spells), grants: make(map[grantee]grant),
		asked: make(map[container.ID]bool), news: make(chan struct{}), tenants: tenant.New("/proc", tenant.Network), measured: make(map[tenant.Key]*measured),
	}
	f.measured[tenant.Key{NetNS: 70}] = &measured{slot: 3, traced: true}
	f.join()
	return f
}

// join makes container 1 a member of the tenant of unwired.
func (f *Latency) join() {
	in, _, _ := f.tenants.Apply(policy.Target{Container: container.Container{ID: 1, NetNS: 70}})
	f.tenants.Settle(in)
}

// part takes container 1 out of the tenant of unwired.
func (f *Latency) part() {
	for _, t := range f.tenants.Remove(1) {
		f.tenants.Settle(t)
	}
}

// A request that waits longer than a lease still gets the first record.
func TestTraceBeyondLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := unwired()
		go func() {
			time.Sleep(3 * lease / 2)
			f.tracer.take(raw(t, nil))
		}()
		began := time.Now()
		out, ok, err := f.Trace(t.Context(), 1, false, api.LatencyFilter{}, maxRecords, 3*lease)
		if err != nil || !ok || len(out.Records) != 1 || time.Since(began) != 3*lease/2 {
			t.Errorf("after %v: %+v, %v, %v; want the record of the fifteenth second", time.Since(began), out, ok, err)
		}
	})
}

// A reader that follows a recording learns that it has missed records once the recording has ended,
// whatever the numbers of the next recording.
func TestNumbersAfterLapse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := unwired()
		ask := func(after uint64) traced {
			t.Helper()
			out, ok, err := f.Trace(t.Context(), 1, false, api.LatencyFilter{After: after}, maxRecords, 0)
			if err != nil || !ok {
				t.Fatal(ok, err)
			}
			return out
		}
		ask(0)
		for range 3 {
			f.tracer.take(raw(t, nil))
		}
		last := ask(1)
		if len(last.Records) != 3 || last.Missed != 0 {
			t.Fatalf("%+v", last)
		}
		tn := f.of(1)
		slots, left := f.tracer.lapsed(time.Now().Add(2 * lease))
		if tn.numbered = slots[tn.slot]; left != 0 || tn.numbered != last.Next {
			t.Fatalf("%v, %d left", slots, left)
		}
		f.tracer = newTraces()
		ask(0)
		for range 5 {
			f.tracer.take(raw(t, nil))
		}
		if got := ask(last.Next); len(got.Records) != 5 || got.Missed != 1 {
			t.Errorf("who followed got %d records, missed %d; want 5, and at least 1 missed", len(got.Records), got.Missed)
		}
		if got := ask(1); len(got.Records) != 5 || got.Missed != 0 {
			t.Errorf("who asks for all got %d records, missed %d", len(got.Records), got.Missed)
		}
		// The container was measured anew: its numbers begin at 1 again.
		f.tracer, tn.numbered = newTraces(), 0
		ask(0)
		f.tracer.take(raw(t, nil))
		if got := ask(last.Next + 5); len(got.Records) != 1 || got.Missed != 1 {
			t.Errorf("of a container that is measured anew %d records, missed %d", len(got.Records), got.Missed)
		}
	})
}

// Containers that ask on their own sockets have the host watched for ten seconds of a minute, two of
// them in any minute. The container that has waited longest comes first. For an operator the host is
// always watched.
func TestSpells(t *testing.T) {
	key := func(n uint64) tenant.Key { return tenant.Key{NetNS: n} }
	s, start := make(spells), time.Unix(1000, 0)
	at := func(sec int) time.Time { return start.Add(time.Duration(sec) * time.Second) }
	has := func(sec int, want ...uint64) {
		t.Helper()
		var got []uint64
		for n := range uint64(5) {
			if s.on(key(n), at(sec)) {
				got = append(got, n)
			}
		}
		if len(got) != len(want) || len(want) > 0 && got[0] != want[0] {
			t.Errorf("after %d s: %v, want %v", sec, got, want)
		}
	}
	greedy := []tenant.Key{key(1), key(2)}
	s.assign(greedy, at(0))
	has(0, 1, 2)
	s.assign(append(greedy, key(3)), at(1))
	has(9, 1, 2)
	has(10)
	s.assign(append(greedy, key(3)), at(59))
	has(59)
	s.assign(append(greedy, key(3)), at(60))
	has(60, 1, 3)
	watched := 0
	for sec := range 3600 {
		s.assign(append(greedy, key(3), key(4)), at(100+sec))
		for n := range uint64(5) {
			if s.on(key(n), at(100+sec)) {
				watched++
				break
			}
		}
	}
	if watched > 3600/3+20 {
		t.Errorf("watched for %d of 3600 seconds", watched)
	}

	synctest.Test(t, func(t *testing.T) {
		f := unwired()
		watches := func(want bool, why string) {
			t.Helper()
			f.mu.Lock()
			defer f.mu.Unlock()
			testkit.Same(t, why, want, f.watches(time.Now()))
		}
		_, err := f.switchTracing(1, true)
		must(t, err)
		watches(true, "just begun")
		time.Sleep(spell)
		watches(false, "its spell is over")
		_, _, err = f.Trace(t.Context(), 1, true, api.LatencyFilter{}, 1, 0)
		must(t, err)
		watches(false, "asked again within the span")
		_, _, err = f.Trace(t.Context(), 1, false, api.LatencyFilter{}, 1, 0)
		must(t, err)
		watches(true, "an operator asks")
		time.Sleep(lease + 1)
		watches(false, "he does no longer")
	})
}

// mostSelf limits the containers that are recorded at their own request.
func TestMostSelf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := unwired()
		f.of(1).traced = false
		for n := range uint64(mostSelf) {
			f.measured[tenant.Key{NetNS: 100 + n}] = &measured{traced: true, askedSelf: time.Now().Add(lease)}
		}
		_, _, err := f.Trace(t.Context(), 1, true, api.LatencyFilter{}, 1, 0)
		if e := (*api.Error)(nil); !errors.As(err, &e) || e.Code != "unavailable" {
			t.Errorf("one more: %v", err)
		}
		if _, ok, err := f.Trace(t.Context(), 1, false, api.LatencyFilter{}, 1, 0); !ok || err != nil {
			t.Errorf("an operator: %v, %v", ok, err)
		}
	})
}

// A container is measured as long as a process asks, also if that is killed. There is no decision
// if policy measures it anyway.
func TestMeasureFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := unwired()
		f.part()
		off, on := false, true
		decided := func(says *bool) []policy.Decision {
			t.Helper()
			out, err := f.Decide([]policy.Target{{Container: container.Container{ID: 1}, Settings: policy.Settings{Latency: says}}}, true)
			must(t, err)
			return out
		}
		ask := func(pid int, on bool) (api.LatencyMeasured, error) {
			out, err := f.Command(t.Context(), &container.Container{ID: 1}, api.Ask{Body: api.LatencyMeasure{On: on, PID: pid}})
			got, _ := out.(api.LatencyMeasured)
			return got, err
		}
		began := time.Now()
		go func() {
			time.Sleep(time.Second)
			if got := decided(&off); len(got) != 1 || got[0].Key != "fairlead.latency" || got[0].Value != "on" || got[0].Expiry.Sub(began) != grantTime {
				t.Errorf("%+v", got)
			}
			f.mu.Lock()
			f.join() // as Apply does
			f.wake()
			f.mu.Unlock()
		}()
		got, err := ask(10, true)
		if err != nil || !got.On || got.Until.Sub(began) != grantTime || time.Since(began) != time.Second {
			t.Fatalf("after %v: %+v, %v", time.Since(began), got, err)
		}
		testkit.None(t, "decided though policy says it", decided(&on))
		_, err = ask(11, true)
		must(t, err)
		_, err = ask(10, false)
		must(t, err)
		if got := decided(nil); len(got) != 1 || got[0].Lapsed(time.Now()) {
			t.Errorf("one of two has ended: %+v", got)
		}
		_, err = ask(11, false)
		must(t, err)
		if got := decided(nil); len(got) != 1 || !got[0].Lapsed(time.Now()) || !got[0].Since.Equal(time.Now()) {
			t.Errorf("both have ended: %+v", got)
		}
		// The end of one grant takes nothing from the next, though it is still to come into force.
		began, f.lapsing = time.Now(), true // there is no ring to close
		go func() {
			time.Sleep(time.Second)
			f.mu.Lock()
			f.part()
			f.wake()
			f.mu.Unlock()
			time.Sleep(time.Second)
			decided(nil)
			_, measured, err := f.Trace(t.Context(), 1, false, api.LatencyFilter{}, 1, 0)
			if want := 3 * time.Second; !measured || err != nil || time.Since(began) != want {
				t.Errorf("recorded after %v: %v, %v", time.Since(began), measured, err)
			}
		}()
		go func() {
			time.Sleep(3 * time.Second)
			f.mu.Lock()
			f.join()
			f.wake()
			f.mu.Unlock()
		}()
		_, err = ask(12, true)
		must(t, err)
		testkit.Same(t, "measured after, by a measurement that was about to end", time.Duration(3*time.Second), time.Since(began))
		time.Sleep(grantTime)
		if got := decided(nil); len(got) != 1 || !got[0].Lapsed(time.Now()) {
			t.Errorf("killed: %+v", got)
		}
		if got := decided(nil); len(got) != 0 || len(f.grants) != 0 {
			t.Errorf("after that: %+v", got)
		}
		// It does not come into force.
		f.part()
		began = time.Now()
		if _, err := ask(13, true); err == nil || time.Since(began) != inForce {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
	})
}
