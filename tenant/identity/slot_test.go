package identity

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

type clock struct{ t time.Time }

func (c *clock) now() time.Time { return c.t }

func take(t *testing.T, a *Allocator, who, want uint64) {
	t.Helper()
	got, err := a.Take(Tenant{NetNS: who})
	if err != nil || got != Slot(want) {
		t.Fatalf("Take(%d): %d, %v, want %d", who, got, err, want)
	}
}

func TestLowestFreeAfterQuarantine(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	a := NewAllocator(c.now)
	take(t, a, 10, 1)
	take(t, a, 20, 2)
	take(t, a, 30, 3)
	a.Release(Tenant{NetNS: 20})
	a.Release(Tenant{NetNS: 10})
	take(t, a, 40, 4) // 1 and 2 are in quarantine
	c.t = c.t.Add(Quarantine - 1)
	take(t, a, 20, 5) // also for the same tenant: its classes have been removed
	c.t = c.t.Add(1)
	take(t, a, 50, 1)
	take(t, a, 60, 2)
	take(t, a, 70, 6)
}

func TestSharedByItsUsers(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	a := NewAllocator(c.now)
	take(t, a, 10, 1)
	take(t, a, 10, 1)
	a.Release(Tenant{NetNS: 10})
	c.t = c.t.Add(2 * Quarantine)
	testkit.Same(t, "with one user left the slot", Slot(1), a.Lookup(Tenant{NetNS: 10}))
	take(t, a, 20, 2)
	a.Release(Tenant{NetNS: 10})
	a.Release(Tenant{NetNS: 10}) // one release too many
	testkit.Same(t, "without users the slot", Nobody, a.Lookup(Tenant{NetNS: 10}))
}

func TestFull(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	a := NewAllocator(c.now)
	for i := range uint64(Max) {
		take(t, a, i+1, i+1)
	}
	for range 2 {
		if s, err := a.Take(Tenant{NetNS: 1 << 40}); !errors.Is(err, ErrFull) || s != Nobody {
			t.Fatalf("one too many: %d, %v, want ErrFull", s, err)
		}
	}
	a.Release(Tenant{NetNS: 7})
	if _, err := a.Take(Tenant{NetNS: 1 << 40}); !errors.Is(err, ErrFull) {
		t.Fatalf("while the free one is in quarantine: %v, want ErrFull", err)
	}
	c.t = c.t.Add(Quarantine)
	take(t, a, 1<<40, 7)
}

func TestOf(t *testing.T) {
	for _, tt := range []struct {
		c    container.Container
		want Tenant
	}{
		{container.Container{ID: 5, NetNS: 77}, Tenant{NetNS: 77}},
		{container.Container{ID: 6, NetNS: 77}, Tenant{NetNS: 77}},
		{container.Container{ID: 7, NetNS: 1, HostNetwork: true}, Tenant{Container: 7}},
	} {
		testkit.Same(t, fmt.Sprintf("TenantKey(%+v)", tt.c), tt.want, tt.c.TenantKey())
	}
}

// No two tenants have one slot at any time, and no tenant gets a slot that was another's less than
// the quarantine ago.
func TestRandom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := &clock{time.Unix(1000, 0)}
		a := NewAllocator(c.now)
		has, users := map[Tenant]Slot{}, map[Tenant]int{}
		released := map[Slot]time.Time{}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			who := Tenant{NetNS: rapid.Uint64Range(1, 12).Draw(t, "who")}
			switch rapid.IntRange(0, 2).Draw(t, "what") {
			case 0:
				s, err := a.Take(who)
				if err != nil {
					t.Fatal(err)
				}
				if old, ok := has[who]; ok && old != s {
					t.Fatalf("%v has %d and then %d", who, old, s)
				}
				for other, o := range has {
					if other != who && o == s {
						t.Fatalf("%v and %v both have %d", who, other, s)
					}
				}
				if at, ok := released[s]; ok && has[who] == 0 && c.t.Sub(at) < Quarantine {
					t.Fatalf("%d was released %v ago", s, c.t.Sub(at))
				}
				has[who] = s
				users[who]++
			case 1:
				a.Release(who)
				if users[who] > 0 {
					if users[who]--; users[who] == 0 {
						released[has[who]] = c.t
						delete(has, who)
					}
				}
			case 2:
				c.t = c.t.Add(time.Duration(rapid.Int64Range(0, int64(Quarantine)).Draw(t, "pass")))
			}
		}
	})
}
