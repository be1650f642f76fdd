package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"testing"
	"testing/synctest"

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
	r := newRoster(s.publish)
	r.records, r.asked = make(map[string]Record), make(map[string]int)
	return r, s
}

// whole says whether the last report was not a partial one.
func (s *said) whole() bool { return !s.reports[len(s.reports)-1].Partial }

func answerWith(rec Record, runs bool, err error) inspect {
	return func(context.Context, string) (Record, bool, error) { return rec, runs, err }
}

const noPID = 1 << 30 // beyond what the kernel gives out

func TestRosterOrder(t *testing.T) {
	r, s := newTestRoster()
	ctx := t.Context()

	// Of two questions, the later one counts, whichever is answered last.
	release := make(chan struct{})
	r.ask(ctx, "a", func(ctx context.Context, _ string) (Record, bool, error) {
		<-release
		return Record{Name: "old"}, true, nil
	})
	r.ask(ctx, "a", answerWith(Record{Name: "new", PID: noPID}, true, nil))
	r.take(<-r.answers)
	close(release)
	r.take(<-r.answers)
	if got := s.names(); !slices.Equal(got, []string{"new"}) {
		t.Errorf("names %v", got)
	}

	// An end that comes while the question is open.
	r.ask(ctx, "b", answerWith(Record{Name: "b"}, true, nil))
	r.end("b")
	r.take(<-r.answers)
	r.end("a")
	r.end("never heard of")
	if got := s.names(); len(got) != 0 {
		t.Errorf("names %v after the ends", got)
	}

	// No answer leaves things as they are; "does not run" does not.
	r.ask(ctx, "c", answerWith(Record{Name: "c", PID: os.Getpid()}, true, nil))
	r.take(<-r.answers)
	r.ask(ctx, "c", answerWith(Record{}, false, errors.New("busy")))
	r.take(<-r.answers)
	// An end that is older than what is known: the process is there.
	r.end("c")
	if got := s.names(); !slices.Equal(got, []string{"c"}) {
		t.Errorf("names %v", got)
	}
	r.ask(ctx, "c", answerWith(Record{}, false, nil))
	r.take(<-r.answers)
	if got := s.names(); len(got) != 0 {
		t.Errorf("names %v of one that does not run", got)
	}
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
		r.ask(ctx, "fine", answerWith(Record{Name: "fine"}, true, nil))
		r.take(<-r.answers)
		if got := s.names(); !slices.Equal(got, []string{"fine"}) || s.whole() {
			t.Errorf("names %v, whole %v", got, s.whole())
		}
		// A list is not held up either, and says what is known.
		r.replace(ctx, []string{"stuck", "fine", "other"}, lives, func(ctx context.Context, key string) (Record, bool, error) {
			if key == "stuck" {
				<-ctx.Done()
			}
			return Record{Name: key}, true, ctx.Err()
		})
		if got := s.names(); !slices.Equal(got, []string{"fine", "other"}) || s.whole() {
			t.Errorf("names %v, whole %v", got, s.whole())
		}
		cancel()
		<-ended
	})
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
		return Record{Name: key + " again"}, true, nil
	}
	r.replace(t.Context(), []string{"kept", "stale", "bad", "ended", "new"}, lives, look)
	if got, want := s.names(), []string{"kept", "new again", "stale again"}; !slices.Equal(got, want) {
		t.Errorf("names %v, want %v", got, want)
	}
	var many []string
	for i := range maxRecords + 10 {
		many = append(many, fmt.Sprint(i))
	}
	r.replace(t.Context(), many, lives, look)
	if len(r.records) != maxRecords {
		t.Errorf("%d records, want %d", len(r.records), maxRecords)
	}
}

// TestRosterFollow goes through what a runtime may do between two lists.
func TestRosterFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &said{}
		r := newRoster(s.publish)
		ctx, cancel := context.WithCancel(t.Context())
		refused := fmt.Errorf("dial: %w", unix.ECONNREFUSED)
		steps := []func() error{
			func() error { return fs.ErrNotExist },
			func() error { return refused },
			func() error { return fs.ErrPermission },
			func() error { r.say(); return errors.New("connection lost") },
			func() error { return fs.ErrNotExist },
			func() error { cancel(); return errors.New("too late") },
		}
		r.follow(ctx, func(context.Context) error {
			step := steps[0]
			steps = steps[1:]
			return step()
		})
		var got []string
		for _, rep := range s.reports {
			got = append(got, fmt.Sprintf("%d %v", len(rep.Records), rep.Err))
		}
		want := []string{
			"0 <nil>", // no such runtime, said once
			"0 permission denied",
			"0 <nil>", // its list
			"0 connection lost",
			"0 file does not exist", // now this is an error: it was there
		}
		if !slices.Equal(got, want) {
			t.Errorf("reports %q, want %q", got, want)
		}
	})
}
