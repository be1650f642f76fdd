package bpf

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// Copies have variables of their own, and one that was given back serves the next user with the
// next user's variables, until it has been idle for too long.
func TestCopy(t *testing.T) {
	testkit.OnKernels(t)
	o := open(t, nil, nil)
	take := func(n uint32) *Copy {
		t.Helper()
		c, err := o.Copy("fl_own", Vars{"fl_self": n})
		must(t, err)
		return c
	}
	wants := func(c *Copy, want uint32) {
		t.Helper()
		if got := run(t, c.Program); got != want {
			t.Errorf("it returns %d, want %d", got, want)
		}
	}
	one, two := take(1), take(2)
	wants(one, 1)
	wants(two, 2)
	must(t, one.Set(Vars{"fl_self": uint32(5)}))
	wants(one, 5)
	wants(two, 2)
	must(t, one.Close())
	again := take(3)
	if again != one {
		t.Error("a copy is loaded while another is idle")
	}
	wants(again, 3)
	testkit.Fails(t, "a constant counts as a copy's variable", testkit.Err(o.Copy("fl_own", Vars{"fl_const": uint32(1)})))
	must(t, again.Close())
	again.until = time.Now()
	o.closeIdle()
	testkit.Same(t, "copies are idle", 0, len(o.idle["fl_own"]))
	must(t, two.Close())
	must(t, o.Close())
	if two.FD() >= 0 {
		t.Error("an idle copy is open after its object")
	}
}
