package journal

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// hanging is a knob. Its Write does not return until release is closed.
type hanging struct {
	Knob
	release, began chan struct{}
}

func (h hanging) Write(v string) error {
	close(h.began)
	<-h.release
	return h.Knob.Write(v)
}

func newHanging(k Knob) hanging { return hanging{k, make(chan struct{}), make(chan struct{})} }

// While a write hangs, notes can be read and changed, and knobs of other places turned and
// restored. Calls for knobs of the same place fail.
func TestOneThatHangsKeepsNoOthersWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBoard("1/a", "1", "1/b", "1", "2/a", "1", "2/b", "1")
		j := open(t, t.TempDir())
		turn(t, j, b.knob("1/b"), "2")
		turn(t, j, b.knob("2/b"), "2")
		h := newHanging(b.knob("1/a"))
		turned := make(chan error, 1)
		go func() { turned <- j.Turn(h, "2", Owner{Feature: "one"}) }()
		<-h.began

		began := time.Now()
		testkit.Same(t, "while one hangs the entries", "1/b:1>2 2/b:1>2 1/a:1>2", brief(j.Entries()))
		soon := time.Now().Add(time.Second)
		if err := j.Extend(nil, soon); err != nil || len(lapsed(j, soon)) != 3 {
			t.Errorf("extended: %v, %v", err, lapsed(j, soon))
		}
		turn(t, j, b.knob("2/a"), "2")
		if out, err := j.Restore(b.open, func(e Entry) bool { return e.Ref.place() == "2" }); err != nil || results(out) != "2/a:restored 2/b:restored" {
			t.Errorf("restore elsewhere: %q, %v", results(out), err)
		}
		testkit.Same(t, "this had to wait", time.Duration(0), time.Since(began))
		if err := j.Turn(b.knob("1/b"), "3", Owner{Feature: "two"}); !errors.Is(err, ErrStuck) || b.get("1/b") != "2" {
			t.Errorf("turn at the same place: %v; the value is %q", err, b.get("1/b"))
		}
		out, err := j.Restore(b.open, nil)
		if !errors.Is(err, ErrStuck) || results(out) != "1/a:failed 1/b:failed" || len(j.Entries()) != 2 {
			t.Errorf("restore at the same place: %q, %v, entries %q", results(out), err, brief(j.Entries()))
		}
		if took := time.Since(began); took > 2*j.patience {
			t.Errorf("all took %v", took)
		}

		close(h.release)
		testkit.Check(t, <-turned)
		if out, err := j.Restore(b.open, nil); err != nil || results(out) != "1/a:restored 1/b:restored" || b.get("1/a") != "1" {
			t.Errorf("restore after it: %q, %v", results(out), err)
		}
	})
}

// All files of one cgroup are at one place; another cgroup is another place.
func TestPlace(t *testing.T) {
	for object, want := range map[string]string{
		"/sys/fs/cgroup/cpu/a/cpu.shares": "/sys/fs/cgroup/cpu/a", "/sys/fs/cgroup/cpu/b/cpu.shares": "/sys/fs/cgroup/cpu/b",
		"/sys/fs/cgroup/cpu/a/fairlead": "/sys/fs/cgroup/cpu/a",
		"4026531840/3/gro":              "4026531840", "12:3456:/sys/fs/cgroup/cpu": "12:3456:", "12:3456": "12:3456",
	} {
		testkit.Same(t, "place of "+object, want, (Ref{Object: object}).place())
	}
}

// Restore abandons calls that do not return, also those of the Opener, and ends however many there
// are. Their later results still count.
func TestRestoreLeavesBehindWhatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBoard()
		j := open(t, t.TempDir())
		const many = 40
		for i := range many {
			b.set(fmt.Sprintf("%d/a", i), "1")
			turn(t, j, b.knob(fmt.Sprintf("%d/a", i)), "2")
		}
		release := make(chan struct{})
		slow := func(r Ref) (Knob, error) {
			if r.Object != "7/a" {
				<-release
			}
			return b.open(r)
		}
		began := time.Now()
		out, err := j.Restore(slow, nil)
		if !errors.Is(err, ErrStuck) || len(out) != many || b.get("7/a") != "1" || len(j.Entries()) != many-1 {
			t.Errorf("%d outcomes, %v; %q", len(out), err, brief(j.Entries()))
		}
		if took := time.Since(began); took > 2*j.patience {
			t.Errorf("it took %v", took)
		}
		close(release)
		synctest.Wait()
		if got := brief(j.Entries()); got != "" || b.get("0/a") != "1" {
			t.Errorf("after their return there is %q, and the value is %q", got, b.get("0/a"))
		}
	})
}

// A call that returns after Close changes nothing in the file.
func TestLateReturn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBoard("1/a", "1")
		dir := t.TempDir()
		j := open(t, dir)
		h := newHanging(b.knob("1/a"))
		turned := make(chan error, 1)
		go func() { turned <- j.Turn(h, "2", Owner{Feature: "one"}) }()
		<-h.began
		must(t, j.Close())
		j = open(t, dir)
		close(h.release)
		if err := <-turned; err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
		if out, err := j.Restore(b.open, nil); err != nil || results(out) != "1/a:restored" || b.get("1/a") != "1" {
			t.Errorf("restore: %q, %v", results(out), err)
		}
	})
}
