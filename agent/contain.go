package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// This file recovers panics; no other file of the agent does. docs/decisions/0014 says which panics
// are recovered, and what follows.

const (
	mostPanics = 3 // panics of one feature within panicTime that make it unavailable
	panicTime  = time.Minute
	loopRest   = 5 * time.Second // pause of a loop after a panic
)

// place is where a panic happened: a method, a loop or a request, and the container that it was
// called for; 0 means none.
type place struct {
	op string
	of container.ID
}

func (p place) String() string {
	if p.of == 0 {
		return p.op
	}
	return p.op + " of container " + p.of.String()
}

// panicked is the error of a call that panicked.
type panicked struct {
	place
	value any
}

func (p *panicked) Error() string {
	return fmt.Sprintf("%s: panic: %v: this is a bug of fairlead; please report it with the stack in the agent's log", p.op, p.value)
}

func isPanic(err error) bool {
	p := (*panicked)(nil)
	return errors.As(err, &p)
}

// errRests is the error of a call that is skipped for some time after a panic.
var errRests = errors.New("is not called for a while, as it has panicked")

// end ends the process with the stack of the panic being recovered. It panics in a new goroutine,
// because a server may recover panics of this one.
func end(value any) {
	stack := debug.Stack()
	go panic(fmt.Sprintf("%v\n\n%s", value, stack))
	select {}
}

// panics counts panics, and logs the stack of each kind once.
type panics struct {
	log    *slog.Logger
	doubt  func() bool // reports that the agent's own state is in doubt: then panics are not recovered; nil: never
	count  atomic.Uint64
	logged sync.Map // the texts logged so far
}

// note records the value that recover returned. A deferred function calls it right after recover.
func (p *panics) note(at place, value any) *panicked {
	stack := debug.Stack()
	if m, ok := value.(*netdev.Panic); ok {
		value, stack = m.Value, m.Stack
	}
	p.count.Add(1)
	err := &panicked{at, value}
	args := []any{"in", at, "panic", value}
	if _, before := p.logged.LoadOrStore(fmt.Sprint(value), true); !before {
		args = append(args, "stack", string(stack))
	}
	p.log.Error("a panic is contained", args...)
	return err
}

// try calls fn. If fn panics, the error is a *panicked.
func (p *panics) try(at place, fn func() error) (err error) {
	defer func() {
		if p.doubt != nil && p.doubt() {
			return // without recover: the panic continues
		}
		if value := recover(); value != nil {
			err = p.note(at, value)
		}
	}()
	return fn()
}

// fence isolates the rest of the agent from the panics of one feature, or of one part that keep
// runs. All calls of a feature, and the turns of its loops, go through it.
type fence struct {
	panics
	pace pace
	fell func() // called when the feature becomes unavailable; nil: nothing

	troubled atomic.Bool // there was a panic: check the fields below

	mu      sync.Mutex
	times   []time.Time // of the last panics
	resting map[place]resting
	readers map[string]*reader // by method
	why     string             // why it is unavailable; "" if it is available
}

// resting is the state of a method or loop that has panicked.
type resting struct {
	until time.Time
	row   int // panics in a row
}

func newFence(f feature.Feature, p pace, log *slog.Logger) *fence {
	return &fence{panics: panics{log: log.With("feature", f.Name())}, pace: p, resting: make(map[place]resting), readers: make(map[string]*reader)}
}

// parts are the fences, by name, of the agent's parts beside the features. All exist before it runs.
type parts map[string]*fence

func (p parts) add(name string, log *slog.Logger, doubt func() bool) *fence {
	p[name] = &fence{panics: panics{log: cmp.Or(log, slog.New(slog.DiscardHandler)).With("part", name), doubt: doubt}, pace: ordinary()}
	return p[name]
}

// keep calls run until ctx ends. After a panic it waits, longer each time, and calls run again.
// After too many panics it returns the reason to give up. told takes that, and each panic.
func (f *fence) keep(ctx context.Context, run func(context.Context) error, told func(error)) (err error) {
	ctx, f.fell = context.WithCancel(ctx)
	defer f.fell()
	for pause := time.Duration(0); ; {
		began := f.pace.now()
		err = f.call(place{op: "run"}, func() error {
			err := run(ctx)
			if p := (*netdev.Panic)(nil); errors.As(err, &p) {
				panic(p)
			}
			return err
		})
		if why := f.unavailable(); why != "" {
			err = errors.New(why)
			told(err)
			return err
		}
		if !isPanic(err) {
			return err
		}
		told(err)
		pause = backoff.Again(pause, loopRest, f.pace.refresh, f.pace.now().Sub(began), panicTime)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// unavailable returns why the feature is no longer called; "" if it still is.
func (f *fence) unavailable() string {
	if f == nil || !f.troubled.Load() {
		return ""
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.why
}

// call calls fn. If fn panics, or the feature is unavailable, it returns an error.
func (f *fence) call(at place, fn func() error) error {
	if why := f.unavailable(); why != "" {
		return errors.New(why)
	}
	return f.try(at, fn)
}

// try is call without the check for availability. Too many panics make the feature unavailable.
func (f *fence) try(at place, fn func() error) error {
	err := f.panics.try(at, fn)
	if p, ok := err.(*panicked); ok && f.strike(p) && f.fell != nil {
		f.fell()
	}
	return err
}

func (f *fence) strike(p *panicked) (fell bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.troubled.Store(true)
	now := f.pace.now()
	f.times = append(f.times, now)
	f.times = f.times[max(0, len(f.times)-mostPanics):]
	if f.why != "" || len(f.times) < mostPanics || now.Sub(f.times[0]) >= panicTime {
		return false
	}
	f.why = fmt.Sprintf("it has panicked %d times within a minute, the last time in %s: %v; what it has done stays", mostPanics, p.place, p.value)
	f.log.Error("it is unavailable until the agent starts again", "why", f.why)
	return true
}

// often is call for code that is called again and again. After a panic it skips calls for the time
// that rest returns for the number of panics in a row.
func (f *fence) often(at place, rest func(panics int) time.Duration, fn func()) error {
	if f.troubled.Load() && f.rests(at) {
		return fmt.Errorf("%s %w", at, errRests)
	}
	err := f.call(at, func() error { fn(); return nil })
	if !f.troubled.Load() {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if isPanic(err) {
		row := f.resting[at].row + 1
		f.resting[at] = resting{f.pace.now().Add(rest(row)), row}
	} else {
		delete(f.resting, at)
	}
	return err
}

func (f *fence) rests(at place) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pace.now().Before(f.resting[at].until)
}

// read calls a method that only reads.
func (f *fence) read(method string, of container.ID, fn func()) error {
	return f.often(place{method, of}, f.pace.rest, fn)
}

// turn runs one turn of a loop. A loop that keeps panicking makes the feature unavailable.
func (f *fence) turn(loop string, fn func()) error {
	return f.often(place{op: loop}, func(int) time.Duration { return loopRest }, fn)
}

// close closes the feature, available or not.
func (f *fence) close(of feature.Feature) error { return f.try(place{op: "close"}, of.Close) }

// verdict returns the feature's support, or why it is no longer called.
func (f *fence) verdict(of feature.Feature) probe.Verdict {
	if why := f.unavailable(); why != "" {
		return probe.Verdict{Level: probe.Unavailable, Why: why, Mend: "systemctl restart fairlead; please report the stack in its log"}
	}
	return of.Support()
}

// quit handles that the feature has become unavailable. What the feature has put in force stays;
// the journal undoes the changes for containers that have ended.
func (w *worker) quit() {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.rows, func(_ container.ID, r *row) bool { return r.want == nil })
	w.move()
	w.left()
}

// contain puts a fence around each feature.
func (a *Agent) contain(f feature.Feature, fence *fence) {
	fence.doubt = a.journal.Broken
	a.fences[f.Name()] = fence
	for _, loop := range f.Loops() {
		loop.Contain(func(turn func()) { fence.turn(loop.Name, turn) })
	}
}

// fence returns the fence of a feature.
func (a *Agent) fence(f feature.Feature) *fence { return a.fences[f.Name()] }

// uncalled converts the error of a call that was skipped or panicked to one of the API.
func uncalled(f feature.Feature, err error) error {
	e := &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: f.Name() + ": " + api.Text(err)}
	if isPanic(err) {
		e.Status, e.Code = http.StatusInternalServerError, "internal"
	}
	return e
}

// Panicked implements serve.Backend and metrics.View.
func (a *Agent) Panicked(request string, value any) error {
	if a.journal.Broken() {
		end(value)
	}
	return &api.Error{Status: http.StatusInternalServerError, Code: "internal", Text: api.Text(a.parts["requests"].note(place{op: request}, value))}
}

// readTime limits the wait for a feature's measurements, which may need a mutex that a hanging call
// holds.
const readTime = 5 * time.Second

// reader calls one method of a feature for all readers of its measurements, one call at a time.
type reader struct {
	turn chan struct{} // capacity 1
	call feature.Loop
}

// reader returns the reader of a method. Errors and the log use the method's name.
func (f *fence) reader(method string) *reader {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.readers[method]
	if r == nil {
		r = &reader{turn: make(chan struct{}, 1)}
		f.readers[method] = r
	}
	return r
}

// errSilent is the error of readBy when the feature does not return in time.
var errSilent = errors.New("does not answer")

// readBy calls fn, a method of the feature behind f. It returns errSilent if fn, or the wait for an
// earlier call, takes longer than readTime. While a call hangs, later ones fail at once, so the
// hanging method blocks one goroutine and no answer about other features. A panic is its error.
func readBy[T any](f *fence, method string, fn func() T) (out T, err error) {
	r := f.reader(method)
	if began := r.call.Busy(); !began.IsZero() && time.Since(began) > readTime {
		return out, errSilent
	}
	late := time.After(readTime)
	select {
	case r.turn <- struct{}{}:
	case <-late:
		return out, errSilent
	}
	var answer T // belongs to the call until got has its error
	got := make(chan error, 1)
	go func() {
		r.call.Begin()
		err := f.read(method, 0, func() { answer = fn() })
		r.call.End()
		<-r.turn
		got <- err
	}()
	select {
	case err := <-got:
		return answer, err
	case <-late:
		return out, errSilent
	}
}

// snapshot returns the feature's measurements, or none if it does not answer.
func (w *worker) snapshot() feature.Snapshot {
	s, _ := readBy(w.fence, "snapshot", w.feature.Snapshot)
	return s
}

// hangs returns a description and the start of a call that has far exceeded its time; "" if there
// is none. The feature does nothing else until that call returns.
func (w *worker) hangs() (what string, since time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.hang(), w.began
}

// hangs describes the hanging call of a feature; "" if there is none. That call may hold a mutex
// that other calls need.
func (a *Agent) hangs(f feature.Feature) string {
	if w := a.worker(f.Name()); w != nil {
		if what, _ := w.hangs(); what != "" {
			return f.Name() + " does not answer: " + what
		}
	}
	return ""
}

func (w *worker) hang() string {
	took := w.pace.now().Sub(w.began)
	if w.busy == nil || took <= 2*w.pace.call {
		return ""
	}
	return fmt.Sprintf("%s, which was given %v, has not returned for %v", w.doing, w.pace.call, took.Truncate(time.Second))
}
