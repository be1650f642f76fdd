package discover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"golang.org/x/sys/unix"
)

const (
	relistEvery = time.Minute
	callTimeout = 10 * time.Second
	parallel    = 16 // queries at a time after a list

	maxCreated   = 256         // created containers that await a start; a list drops those beyond
	listPatience = time.Second // for the answers that follow a list

	minBackOff = 50 * time.Millisecond
	maxBackOff = 2 * time.Second
	maxRetry   = 30 * time.Second // bounds the pause between two queries about one container
)

// roster is a source's list of the running containers of a runtime, built from the runtime's events
// and lists. Queries run in other goroutines, so a runtime that hangs over one container does not
// delay the others. Everything else belongs to one goroutine.
type roster struct {
	at      string // the runtime and its address, for errors
	publish func(Report)
	answers chan answer

	// Of the current session:
	records map[string]Record    // without PID: it awaits its start
	asked   map[string]*question // the open query about each container
	whole   bool                 // the runtime has listed its containers

	none   bool // the last report was that there is no such runtime
	listed bool // a list was reported
}

// inspect asks the runtime about one container; false means that it does not run. If both the error
// and the bool are set, the record is complete except for what the error says is missing.
type inspect func(ctx context.Context, key string) (Record, bool, error)

// current reports whether a known record is still valid.
type current func(key string, rec Record) bool

// watched handles a runtime's events. It lists the containers at first, after pause, after each
// every, and when event returns true. It returns the error that ends this.
func watched[E any](ctx context.Context, r *roster, events <-chan E, broken <-chan error, pause, every time.Duration, event func(E) (list bool), list func(context.Context) ([]string, current, error), look inspect) error {
	relist := time.NewTimer(0)
	defer relist.Stop()
	for {
		select {
		case ev := <-events:
			if event(ev) {
				relist.Reset(0)
			}
		case got := <-r.answers:
			r.take(got)
		case <-relist.C:
			call, cancel := context.WithTimeout(ctx, callTimeout)
			keys, right, err := list(call)
			cancel()
			if err != nil {
				return err
			}
			r.replace(ctx, keys, right, look)
			relist.Reset(pause)
			pause = every
		case err := <-broken:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// forward sends what recv returns to a channel, until recv fails or ctx ends.
func forward[E any](ctx context.Context, recv func() (E, error), to chan<- E) error {
	for {
		got, err := recv()
		if err != nil {
			return err
		}
		select {
		case to <- got:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// question is a query that is repeated until it succeeds or cancel is called.
type question struct {
	cancel context.CancelFunc
	err    error // of the last try
}

type answer struct {
	key      string
	question *question
	record   Record
	runs     bool
	err      error
}

// rostered is the source of a runtime whose containers are in a roster.
type rostered struct {
	name, addr string
	session    func(context.Context, *roster) error // see follow
}

func (s rostered) Name() string { return s.name }

func (s rostered) Run(ctx context.Context, publish func(Report)) error {
	newRoster(s.name, s.addr, publish).follow(ctx, s.session)
	return nil
}

func newRoster(name, addr string, publish func(Report)) *roster {
	return &roster{at: name + " at " + addr, publish: publish, answers: make(chan answer)}
}

// follow runs session, which uses one connection to the runtime, repeatedly until ctx ends. It
// reports why each session ended. A runtime that was never there is not an error, but one that left
// its socket behind is.
func (r *roster) follow(ctx context.Context, session func(context.Context, *roster) error) {
	retry(ctx, minBackOff, maxBackOff, func(ctx context.Context) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel() // ends the session's questions
		r.begin()
		err := session(ctx, r)
		if ctx.Err() != nil {
			return
		}
		absent := errors.Is(err, fs.ErrNotExist) && !r.listed
		switch {
		case !absent && !r.listed && errors.Is(err, unix.ECONNREFUSED):
			r.publish(Report{Partial: true, Err: r.wrap(err)})
		case !absent:
			r.publish(Report{Err: r.wrap(err)})
		case !r.none:
			r.publish(Report{Partial: true, Absent: true})
		}
		r.none = absent
	})
}

func (r *roster) begin() {
	r.records, r.asked, r.whole = make(map[string]Record), make(map[string]*question), false
}

// retry runs session repeatedly until ctx ends. The pause between sessions begins at first, and
// doubles up to most while sessions end at once.
func retry(ctx context.Context, first, most time.Duration, session func(context.Context)) {
	for pause := time.Duration(0); ctx.Err() == nil; {
		start := time.Now()
		session(ctx)
		pause = backoff.Again(pause, first, most, time.Since(start), most)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// listens returns an error unless a server listens at a unix socket. The runtimes' clients do not
// report why they cannot connect.
func listens(ctx context.Context, path string) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	return conn.Close()
}

// ask inspects a container until the runtime answers without an error. The pauses grow, and each
// answer arrives in answers.
func (r *roster) ask(ctx context.Context, key string, look inspect) {
	r.drop(key)
	ctx, cancel := context.WithCancel(ctx)
	q := &question{cancel: cancel}
	r.asked[key] = q
	go func() {
		defer cancel()
		for pause := minBackOff; ; pause = backoff.Next(pause, minBackOff, maxRetry) {
			got := answer{key: key, question: q}
			call, done := context.WithTimeout(ctx, callTimeout)
			got.err = contained(func() (err error) {
				got.record, got.runs, err = look(call, key)
				return unanswered(call, err)
			})
			done()
			got.record = bounded(got.record)
			select {
			case r.answers <- got:
			case <-ctx.Done():
				return
			}
			if got.err == nil {
				return
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
		}
	}()
}

// unanswered returns the error of a call. It replaces that of a call which ended by its timeout.
func unanswered(call context.Context, err error) error {
	if err != nil && call.Err() != nil {
		return fmt.Errorf("no answer within %v", callTimeout)
	}
	return err
}

// drop cancels the open query about a container, and reports whether there was one.
func (r *roster) drop(key string) bool {
	q := r.asked[key]
	if q != nil {
		q.cancel()
		delete(r.asked, key)
	}
	return q != nil
}

// knows reports whether a container runs or is being asked about.
func (r *roster) knows(key string) bool { return r.records[key].PID > 0 || r.asked[key] != nil }

// take handles an answer, and publishes the list if it has changed.
func (r *roster) take(got answer) {
	if r.note(got) {
		r.say()
	}
}

// note records an answer, unless a later query or the container's end has superseded it. It reports
// whether the list has changed.
func (r *roster) note(got answer) bool {
	q := r.asked[got.key]
	if q != got.question {
		return false
	}
	if got.err != nil {
		news := q.err == nil || q.err.Error() != got.err.Error()
		q.err = got.err
		if was, ok := r.records[got.key]; got.runs && (!ok || was.PID != got.record.PID) {
			r.records[got.key], news = got.record, true
		}
		return news
	}
	delete(r.asked, got.key)
	if got.runs {
		r.records[got.key] = got.record
	} else {
		delete(r.records, got.key)
	}
	return true
}

// end records that a container has ended. One that still exists and has policy awaits its next start.
func (r *roster) end(key string, stays bool) {
	news := r.drop(key) // its answer would be stale
	// The event may predate a list, and the container may have restarted since.
	if rec, known := r.records[key]; known && (rec.PID == 0 && !stays || rec.PID > 0 && unix.Kill(rec.PID, 0) != nil) {
		delete(r.records, key)
		if rec.PID = 0; stays && (asks(rec.Labels) || asks(rec.ImageLabels)) {
			r.records[key] = rec
		}
		news = true
	}
	if news {
		r.say()
	}
}

// replace sets the list to the running containers with these keys. It inspects unknown ones, and
// those whose record current rejects, unless a query is already open. It waits for the answers only
// for listPatience; later answers count, too.
func (r *roster) replace(ctx context.Context, keys []string, current current, look inspect) {
	slots := make(chan struct{}, parallel)
	slowly := func(ctx context.Context, key string) (Record, bool, error) {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return Record{}, false, ctx.Err()
		}
		defer func() { <-slots }()
		return look(ctx, key)
	}
	keys = keys[:min(len(keys), maxRecords)]
	listed := make(map[string]bool, len(keys))
	for _, key := range keys {
		listed[key] = true
	}
	many := len(r.records) > len(keys)+maxCreated
	maps.DeleteFunc(r.records, func(key string, rec Record) bool {
		if rec.PID == 0 {
			return many || listed[key]
		}
		return !listed[key] || !current(key, rec)
	})
	for key := range r.asked {
		if !listed[key] {
			r.drop(key)
		}
	}
	for _, key := range keys {
		if !r.knows(key) {
			r.ask(ctx, key, slowly)
		}
	}
	r.whole = true
	patience := time.After(listPatience)
	for waiting := true; waiting && len(r.asked) > 0; {
		select {
		case got := <-r.answers:
			r.note(got)
		case <-patience:
			waiting = false
		case <-ctx.Done():
			return
		}
	}
	r.say()
}

func (r *roster) say() {
	rep := Report{Partial: !r.whole || len(r.asked) > 0}
	for _, rec := range r.records {
		to := &rep.Records
		if rec.PID == 0 {
			to = &rep.Created
		}
		*to = append(*to, rec)
	}
	var failed []string
	for key, q := range r.asked {
		if q.err != nil {
			failed = append(failed, key)
		}
	}
	if len(failed) > 0 {
		slices.Sort(failed)
		key := failed[max(0, slices.IndexFunc(failed, func(key string) bool { return errors.As(r.asked[key].err, new(*netdev.Panic)) }))]
		rep.Err = r.wrap(fmt.Errorf("look at container %s: %w", key, r.asked[key].err))
		if more := len(failed) - 1; more > 0 {
			rep.Err = fmt.Errorf("%w (and at %d more)", rep.Err, more)
		}
	}
	r.publish(rep)
	r.listed = true
}

// wrap adds the runtime to an error.
func (r *roster) wrap(err error) error {
	if err == nil {
		err = errors.New("connection ended")
	}
	return fmt.Errorf("%s: %w", r.at, err)
}
