package discover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"golang.org/x/sys/unix"
)

// said collects what a roster reports.
type said struct{ reports []Report }

func (s *said) publish(rep Report) { s.reports = append(s.reports, rep) }

func (s *said) names() []string {
	var names []string
	for _, rec := range s.reports[len(s.reports)-1].Records {
		names = append(names, rec.Name)
	}
	slices.Sort(names)
	return names
}

func newTestRoster() (*roster, *said) {
	s := &said{}
	r := newRoster("docker", "there", s.publish)
	r.begin()
	r.whole = true
	return r, s
}

// whole reports whether the last report was not a partial one.
func (s *said) whole() bool { return !s.reports[len(s.reports)-1].Partial }

func answerWith(rec Record, runs bool, err error) inspect {
	return func(context.Context, string) (Record, bool, error) { return rec, runs, err }
}

const noPID = 1 << 30 // beyond what the kernel gives out

func TestRosterOrder(t *testing.T) {
	r, s := newTestRoster()
	ctx := t.Context()
	// A question that was taken back may have an answer on its way.
	answered := func(key string) {
		q := r.asked[key]
		for {
			got := <-r.answers
			r.take(got)
			if got.question == q {
				return
			}
		}
	}

	// Of two questions, the later one counts, whichever is answered first.
	r.ask(ctx, "a", answerWith(Record{Name: "old"}, true, nil))
	old := answer{key: "a", question: r.asked["a"], record: Record{Name: "old"}, runs: true}
	r.ask(ctx, "a", answerWith(Record{Name: "new", PID: noPID}, true, nil))
	answered("a")
	r.take(old)
	testkit.Same(t, "names", []string{"new"}, s.names())

	// An end that comes while the question is open.
	r.ask(ctx, "b", answerWith(Record{Name: "b"}, true, nil))
	old = answer{key: "b", question: r.asked["b"], record: Record{Name: "b"}, runs: true}
	r.end("b", false)
	r.take(old)
	r.end("a", false)
	r.end("never heard of", false)
	testkit.None(t, "names", s.names())

	// No answer leaves things as they are; "does not run" does not.
	r.ask(ctx, "c", answerWith(Record{Name: "c", PID: os.Getpid()}, true, nil))
	answered("c")
	r.ask(ctx, "c", answerWith(Record{}, false, errors.New("busy")))
	answered("c")
	// An end that is older than what is known: the process is there.
	r.end("c", false)
	testkit.Same(t, "names", []string{"c"}, s.names())
	r.ask(ctx, "c", answerWith(Record{}, false, nil))
	answered("c")
	testkit.None(t, "names", s.names())
	if len(r.asked) != 0 {
		t.Errorf("open questions %v", r.asked)
	}
}

// TestRosterHangs has a runtime that hangs over one container.
func TestRosterHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := newTestRoster()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		r.ask(ctx, "stuck", func(ctx context.Context, _ string) (Record, bool, error) {
			defer close(ended)
			<-ctx.Done()
			return Record{}, false, ctx.Err()
		})
		r.ask(ctx, "fine", answerWith(Record{Name: "fine", PID: os.Getpid()}, true, nil))
		r.take(<-r.answers)
		if got := s.names(); !slices.Equal(got, []string{"fine"}) || s.whole() {
			t.Errorf("names %v, whole %v", got, s.whole())
		}
		// A list is not held up either, and says what is known.
		r.replace(ctx, []string{"stuck", "fine", "other"}, lives, func(ctx context.Context, key string) (Record, bool, error) {
			if key == "stuck" {
				<-ctx.Done()
			}
			return Record{Name: key, PID: os.Getpid()}, true, ctx.Err()
		})
		if got := s.names(); !slices.Equal(got, []string{"fine", "other"}) || s.whole() {
			t.Errorf("names %v, whole %v", got, s.whole())
		}
		cancel()
		<-ended
	})
}

// A panic over one container, or of one place, is an error of it, named before others.
func TestRosterPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := newTestRoster()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r.begin()
		r.replace(ctx, []string{"bad", "fine", "torn"}, lives, func(_ context.Context, key string) (Record, bool, error) {
			switch key {
			case "bad":
				return Record{}, false, errors.New("busy")
			case "torn":
				panic("at odds")
			}
			return Record{Name: key, PID: os.Getpid()}, true, nil
		})
		err, p := s.reports[len(s.reports)-1].Err, (*netdev.Panic)(nil)
		if got := s.names(); !slices.Equal(got, []string{"fine"}) || s.whole() || !errors.As(err, &p) || !strings.Contains(string(p.Stack), "TestRosterPanics") {
			t.Errorf("names %v, whole %v, err %v", got, s.whole(), err)
		}
		if want := "docker at there: look at container torn: panic: at odds: this is a bug of fairlead; please report it with the stack in the agent's log (and at 1 more)"; err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
	})
	for _, value := range []any{"at odds", &netdev.Panic{Value: "at odds"}} {
		err, p := places{torn{value: value}, torn{}}.Run(t.Context(), nil), (*netdev.Panic)(nil)
		if !errors.As(err, &p) || p.Value != "at odds" {
			t.Errorf("a place that panics: %v", err)
		}
	}
}

// torn is a place that panics, if it has a value.
type torn struct {
	Source
	value any
}

func (s torn) Run(ctx context.Context, _ func(Report)) error {
	if s.value != nil {
		panic(s.value)
	}
	<-ctx.Done()
	return ctx.Err()
}

func TestRosterReplace(t *testing.T) {
	r, s := newTestRoster()
	r.records["kept"] = Record{Name: "kept", PID: os.Getpid()}
	r.records["stale"] = Record{Name: "stale", PID: noPID}
	r.records["gone"] = Record{Name: "gone", PID: os.Getpid()}
	look := func(_ context.Context, key string) (Record, bool, error) {
		switch key {
		case "kept":
			return Record{}, false, errors.New("asked about one that is known")
		case "bad":
			return Record{}, false, errors.New("no answer")
		case "ended":
			return Record{}, false, nil
		}
		return Record{Name: key + " again", PID: os.Getpid()}, true, nil
	}
	r.replace(t.Context(), []string{"kept", "stale", "bad", "ended", "new"}, lives, look)
	testkit.Same(t, "names", []string{"kept", "new again", "stale again"}, s.names())
	var many []string
	for i := range maxRecords + 10 {
		many = append(many, fmt.Sprint(i))
	}
	r.replace(t.Context(), many, lives, look)
	testkit.Same(t, "records", maxRecords, len(r.records))
}

// TestRosterFollow goes through what a runtime may do between two lists.
func TestRosterFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &said{}
		r := newRoster("docker", "there", s.publish)
		ctx, cancel := context.WithCancel(t.Context())
		refused := fmt.Errorf("dial: %w", unix.ECONNREFUSED)
		steps := []func() error{
			func() error { return fs.ErrNotExist },
			func() error { return fs.ErrNotExist },
			func() error { return refused },
			func() error { return fs.ErrPermission },
			func() error { r.whole = true; r.say(); return errors.New("connection lost") },
			func() error { return fs.ErrNotExist },
			func() error { cancel(); return errors.New("too late") },
		}
		r.follow(ctx, func(context.Context, *roster) error {
			step := steps[0]
			steps = steps[1:]
			return step()
		})
		var got []string
		for _, rep := range s.reports {
			got = append(got, fmt.Sprintf("%d %v %v %v", len(rep.Records), rep.Partial, rep.Absent, rep.Err))
		}
		want := []string{
			"0 true true <nil>", // no such runtime, said once
			"0 true false docker at there: dial: connection refused", // it has left its socket
			"0 false false docker at there: permission denied",
			"0 false false <nil>", // its list
			"0 false false docker at there: connection lost",
			"0 false false docker at there: file does not exist", // now this is an error: it was there
		}
		testkit.Same(t, "reports", want, got)
	})
}

// TestRosterFails has a runtime that fails over one container, and then answers: the list is not
// whole until it does, and says why.
func TestRosterFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := newTestRoster()
		r.begin()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		// An event that comes before the first list.
		r.ask(ctx, "early", answerWith(Record{Name: "early", PID: os.Getpid()}, true, nil))
		r.take(<-r.answers)
		if s.whole() {
			t.Error("the list is whole before there was one")
		}
		var tries atomic.Int64
		half := Record{Name: "half", PID: os.Getpid(), Unread: true}
		look := func(ctx context.Context, key string) (Record, bool, error) {
			switch n := tries.Add(1); {
			case key == "early":
				t.Error("asked again about one that is known")
			case n == 1:
				return Record{}, false, errors.New("busy")
			case n < 10:
				return half, true, errors.New("the image is locked")
			case n == 10:
				<-ctx.Done()
				return half, true, ctx.Err()
			}
			return Record{Name: "bad", PID: os.Getpid()}, true, nil
		}
		r.replace(ctx, []string{"early", "bad"}, lives, look)
		last := func() Report { return s.reports[len(s.reports)-1] }
		if got := s.names(); !slices.Equal(got, []string{"early", "half"}) || s.whole() || last().Err == nil {
			t.Errorf("names %v, whole %v, err %v", got, s.whole(), last().Err)
		}
		said := len(s.reports)
		for tries.Load() < 9 {
			r.take(<-r.answers)
		}
		if len(s.reports) != said {
			t.Errorf("the same failure was reported %d times", len(s.reports)-said+1)
		}
		r.take(<-r.answers)
		if want := "docker at there: look at container bad: no answer within 10s"; last().Err == nil || last().Err.Error() != want {
			t.Errorf("error %v, want %s", last().Err, want)
		}
		r.take(<-r.answers)
		if got := s.names(); !slices.Equal(got, []string{"bad", "early"}) || !s.whole() || last().Err != nil {
			t.Errorf("names %v, whole %v, err %v", got, s.whole(), last().Err)
		}
		// The next list knows nothing of one over which the runtime failed.
		r.ask(ctx, "bad", answerWith(Record{}, false, errors.New("busy")))
		r.take(<-r.answers)
		r.replace(ctx, []string{"early"}, lives, look)
		if got := s.names(); !slices.Equal(got, []string{"early"}) || !s.whole() || last().Err != nil {
			t.Errorf("names %v, whole %v, err %v", got, s.whole(), last().Err)
		}
	})
}
