package agent

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"reflect"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/policy"
)

// worker makes one feature match what is wanted, one call at a time. Each feature has its own
// worker, so a feature that is slow or hangs delays no other.
//
// A worker is level-triggered: want replaces the whole list, and step compares it with what has
// been applied.
type worker struct {
	feature feature.Feature
	fence   *fence
	pace    pace
	log     *slog.Logger
	wake    chan struct{}                                          // capacity 1
	left    func()                                                 // called when a container has nothing left, and when begun is set
	contest func(feature string, id container.ID, err error) error // see rewritten

	deciding feature.Loop // of the controller of a feature that decides

	mu     sync.Mutex
	ending bool // stop was called: want has no effect any more
	rows   map[container.ID]*row
	prune  row                // its want stays nil
	alive  bool               // the list is complete, so prune may be called
	begun  bool               // everything in the first complete list was tried: see adopted
	cancel context.CancelFunc // cancels the call in progress; nil if there is none
	busy   *row               // the row of that call; nil if there is none
	doing  string             // the name of that call
	began  time.Time          // its start
	moved  chan struct{}      // closed at the next end of a call

	calls, failures uint64 // since newWorker
}

// row is the state of the feature for one container.
type row struct {
	id      container.ID
	want    *policy.Target // nil: nothing may stay in force
	netns   uint64         // of the container when it was last wanted
	asked   uint64         // incremented when want changes
	touched bool           // Apply was called, so Remove is due at the end
	settled bool           // the host matches want
	awaited bool           // settle waits for the end of its next call
	tries   int            // failures in a row
	tried   time.Time      // end of the last call
	away    time.Time      // since when an object is missing or containers disagree; zero: neither
	told    bool           // the log has that
	err     error          // of the last call
	since   time.Time      // when settled or err last changed
	due     time.Time      // of the next call
}

func newWorker(f feature.Feature, p pace, log *slog.Logger, left func()) *worker {
	w := &worker{
		feature: f, pace: p, log: log.With("feature", f.Name()),
		wake:  make(chan struct{}, 1),
		left:  left,
		fence: newFence(f, p, log),
		rows:  make(map[container.ID]*row),
		moved: make(chan struct{}),
	}
	w.fence.fell = w.quit
	if n, ok := f.(feature.Notifier); ok {
		n.Notify(w.again)
	}
	return w
}

// want replaces the list of targets. Containers missing from it are removed at once, and a call for
// one of them is cancelled. With complete, targets holds every running container.
func (w *worker) want(targets map[container.ID]*policy.Target, complete bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ending {
		w.replace(targets, complete)
	}
}

func (w *worker) replace(targets map[container.ID]*policy.Target, complete bool) {
	now := w.pace.now()
	for id, t := range targets {
		r := w.rows[id]
		if r == nil {
			r = &row{id: id}
			w.rows[id] = r
		}
		r.netns = t.Container.NetNS
		if !reflect.DeepEqual(r.want, t) { // usually the same pointer
			w.ask(r, t, now)
		}
	}
	for id, r := range w.rows {
		if _, wanted := targets[id]; wanted || r.want == nil {
			continue
		}
		if !r.touched || w.fence.unavailable() != "" {
			delete(w.rows, id)
			continue
		}
		w.ask(r, nil, now)
		if w.busy == r {
			w.cancel()
		}
	}
	if complete && !w.alive {
		w.prune.due, w.prune.since = now, now
	}
	w.alive = complete
	w.begun = w.begun || w.tried()
	poke(w.wake)
}

// move wakes all that wait for the end of a call.
func (w *worker) move() {
	close(w.moved)
	w.moved = make(chan struct{})
}

// adopted reports whether everything in the first complete list has been tried once. What an
// earlier agent left in force and no call has adopted by then has no owner.
func (w *worker) adopted() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.begun
}

// tried reports whether each call that a complete list requires was made at least once.
func (w *worker) tried() bool {
	for _, r := range w.rows {
		if r.want != nil && !r.settled && r.tries == 0 {
			return false
		}
	}
	return w.alive
}

// has reports whether anything of a container is wanted or may be in force.
func (w *worker) has(id container.ID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rows[id] != nil
}

func (w *worker) ask(r *row, t *policy.Target, now time.Time) {
	r.want, r.settled, r.tries, r.away, r.told, r.err = t, false, 0, time.Time{}, false, nil
	r.asked++
	r.due, r.since = now, now
}

// run makes the calls that are due until ctx ends.
func (w *worker) run(ctx context.Context) {
	for ctx.Err() == nil {
		did, next := w.step(ctx)
		if did {
			continue
		}
		timer := time.NewTimer(next.Sub(w.pace.now()))
		if next.IsZero() {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
		case <-w.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// step makes the most urgent call. If none is due, it returns the time of the next one; zero means
// never, as things stand.
func (w *worker) step(ctx context.Context) (did bool, next time.Time) {
	if w.fence.unavailable() != "" {
		return false, next
	}
	w.mu.Lock()
	r, next := w.choose()
	if r == nil {
		w.mu.Unlock()
		return false, next
	}
	ctx, cancel := context.WithTimeout(ctx, w.pace.call)
	defer cancel()
	at := place{r.op(w), r.id}
	w.busy, w.cancel, w.began, w.doing = r, cancel, w.pace.now(), at.String()
	target, asked := r.want, r.asked
	var alive map[container.ID]bool
	if r == &w.prune {
		alive = make(map[container.ID]bool, len(w.rows))
		for id := range w.rows {
			alive[id] = true // even containers that wait for Remove, which cleans up after them
		}
	} else if target != nil {
		r.touched = true
	}
	w.mu.Unlock()

	err := w.fence.call(at, func() error {
		switch {
		case alive != nil:
			return w.feature.Prune(ctx, func(id container.ID) bool { return alive[id] })
		case target == nil:
			return w.feature.Remove(ctx, r.id)
		}
		err := withRefused(w.feature.Name(), *target, w.feature.Apply(ctx, *target))
		if w.contest != nil {
			err = w.contest(w.feature.Name(), r.id, err)
		}
		return err
	})

	w.mu.Lock()
	defer w.mu.Unlock()
	w.busy, w.cancel = nil, nil
	w.note(r, asked, err)
	if !w.begun && w.tried() {
		w.begun = true
		w.left() // what was not adopted is now due for sweep
	}
	w.move()
	return true, time.Time{}
}

// note records the result of a call; asked is the row's asked from before the call.
func (w *worker) note(r *row, asked uint64, err error) {
	now := w.pace.now()
	w.calls++
	if r.asked != asked { // want has changed since, and that call is due
		return
	}
	r.tried, r.awaited = now, false
	if err != nil && r.news(err, now) && !errors.Is(err, context.Canceled) && !isPanic(err) {
		// Policy asks for a part that cannot be in force: the container's status shows it.
		level, what := slog.LevelWarn, "not in force"
		if errors.Is(err, feature.ErrPartly) {
			level, what = slog.LevelInfo, "in force in part"
		}
		w.log.Log(context.Background(), level, what, "container", r.id, "op", r.op(w), "err", err)
	}
	failed := err != nil && !errors.Is(err, feature.ErrPartly)
	if r.settled == failed || (r.err == nil) != (err == nil) {
		r.since = now
	}
	changed := !r.settled
	r.settled, r.err = !failed, err
	switch {
	case failed:
		w.failures++
		r.tries++
		r.due = now.Add(w.pace.backoff(r.tries))
		if isPanic(err) {
			r.due = now.Add(w.pace.rest(r.tries))
		}
	case r != &w.prune && r.want == nil:
		delete(w.rows, r.id)
		// Other containers in the namespace may have shared it.
		w.sharing(r, func(other *row) { other.due = now })
		w.left()
	default:
		if changed { // it may have blocked other containers in the namespace
			w.sharing(r, func(other *row) {
				if !other.settled {
					other.due = now
				}
			})
		}
		r.tries, r.away, r.told = 0, time.Time{}, false
		r.due = now.Add(w.pace.spread(w.pace.refresh))
		if errors.Is(err, feature.ErrPartly) { // the host may change without an event
			r.due = now.Add(w.pace.spread(w.pace.longest))
		}
	}
}

// sharing calls do for all rows with the network namespace of r.
func (w *worker) sharing(r *row, do func(*row)) {
	for _, other := range w.rows {
		if other != r && r.netns != 0 && other.netns == r.netns {
			do(other)
		}
	}
}

// passing is how long a failure is not reported if an object has gone or containers disagree. A
// device goes a moment before the end of its container, or its new list of devices, is known. A
// change for all containers of a netns reaches one after the other.
const passing = 2 * time.Second

// news reports whether to log an error.
func (r *row) news(err error, now time.Time) bool {
	if !kernel.Gone(err) && !errors.Is(err, feature.ErrDisagree) {
		r.away = time.Time{}
		return r.err == nil || r.err.Error() != err.Error()
	}
	if r.away.IsZero() {
		r.away = now
	}
	if r.told || now.Sub(r.away) < passing || r.ended() {
		return false
	}
	r.told = true
	return true
}

// ended reports whether the container has ended, even if the list does not say so yet.
func (r *row) ended() bool {
	if r.want == nil || r.want.Container.Cgroup.V2 == "" {
		return r.want == nil
	}
	_, err := os.Stat(r.want.Container.Cgroup.V2)
	return errors.Is(err, fs.ErrNotExist)
}

func (r *row) op(w *worker) string {
	switch {
	case r == &w.prune:
		return "prune"
	case r.want == nil:
		return "remove"
	}
	return "apply"
}

// The order of due calls: a held start waits for no other container, and calls for ended or new
// containers never wait for retries.
const (
	urgencyAwaited = iota
	urgencyRemove
	urgencyApply
	urgencyPrune
	urgencyRetry
	urgencyRefresh
)

func (w *worker) urgency(r *row) int {
	switch {
	case r == &w.prune:
		return urgencyPrune
	case r.awaited:
		return urgencyAwaited
	case r.settled:
		return urgencyRefresh
	case r.tries > 0:
		return urgencyRetry
	case r.want == nil:
		return urgencyRemove
	}
	return urgencyApply
}

// choose returns the most urgent row that is due, or the time of the next one.
func (w *worker) choose() (best *row, next time.Time) {
	now := w.pace.now()
	look := func(r *row) {
		if r.due.After(now) {
			if next.IsZero() || r.due.Before(next) {
				next = r.due
			}
			return
		}
		if best == nil || w.urgency(r) < w.urgency(best) ||
			w.urgency(r) == w.urgency(best) && (r.due.Before(best.due) || r.due.Equal(best.due) && r.id < best.id) {
			best = r
		}
	}
	for _, r := range w.rows {
		look(r)
	}
	if w.alive {
		look(&w.prune)
	}
	return best, next
}

// letGo waits until the feature has nothing left for the matching containers, until Remove has
// failed for the remaining ones, or until ctx ends. The caller has already removed the containers
// from the list.
func (w *worker) letGo(ctx context.Context, match func(container.ID) bool) {
	w.until(ctx, func() bool {
		for id, r := range w.rows {
			if match(id) && r.want == nil && r.tries == 0 {
				return false
			}
		}
		return true
	})
}

// settle waits until the feature has applied a container's target, or failed to. It returns the
// feature's error; nil if nothing is wanted. When ctx ends, it returns the error of ctx.
func (w *worker) settle(ctx context.Context, id container.ID) (err error) {
	late := w.until(ctx, func() bool {
		r, why := w.rows[id], w.fence.unavailable()
		switch {
		case why != "":
			err = errors.New(why)
		case r == nil || r.settled: // as far as this host supports it
		case r.err != nil:
			err = r.err
		default:
			r.awaited = true
			return false
		}
		return true
	})
	return cmp.Or(late, err)
}

// until waits until done returns true. It asks at once and after each call. The error is ctx's.
func (w *worker) until(ctx context.Context, done func() bool) error {
	for {
		w.mu.Lock()
		is, moved := done(), w.moved
		w.mu.Unlock()
		if is {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-moved:
		}
	}
}

// stop removes everything that was applied, with a few attempts per container, and closes the
// feature. The caller waits for run to return first.
func (w *worker) stop(ctx context.Context) error {
	const enough = 3
	w.mu.Lock()
	w.replace(nil, false)
	w.ending = true
	w.mu.Unlock()
	for ctx.Err() == nil {
		w.mu.Lock()
		for _, r := range w.rows {
			if r.tries >= enough || isPanic(r.err) {
				w.log.Error("left for the journal to restore", "container", r.id, "err", r.err)
				delete(w.rows, r.id)
			}
		}
		left := len(w.rows)
		w.mu.Unlock()
		if left == 0 {
			break
		}
		if did, next := w.step(ctx); !did {
			select {
			case <-ctx.Done():
			case <-time.After(next.Sub(w.pace.now())):
			}
		}
	}
	return w.fence.close(w.feature)
}

// again requests another Apply of a container's Target, because its result would differ now. The
// call is due at once or, if the last one failed, a second after that one.
func (w *worker) again(id container.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.rows[id]
	if r == nil || r.want == nil {
		return
	}
	due := w.pace.now()
	if r.tries > 0 {
		if due = r.tried.Add(time.Second); !due.Before(r.due) {
			return
		}
	}
	if w.busy == r { // the running call may work with old state
		r.asked++
	}
	r.due = due
	poke(w.wake)
}
