package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	relistEvery = time.Minute
	callTimeout = 10 * time.Second
	parallel    = 16 // questions at a time after a list

	listPatience = time.Second // with the answers to them

	minBackOff = 50 * time.Millisecond
	maxBackOff = 2 * time.Second
)

// roster is the list of running containers that the source of a runtime keeps,
// from the runtime's events and lists. Questions to the runtime are asked in
// other goroutines, so that one container over which the runtime hangs does not
// delay the others. Everything else belongs to one goroutine.
type roster struct {
	publish func(Report)
	answers chan answer

	records map[string]Record
	asked   map[string]int // the last question about a container, if it is open
	last    int            // number of a question

	none   bool // it was reported that there is no such runtime
	listed bool // a list was reported: there is one
}

// inspect asks the runtime about one container; false means that it does not
// run.
type inspect func(ctx context.Context, key string) (Record, bool, error)

type answer struct {
	key    string
	asked  int
	record Record
	runs   bool
	err    error
}

func newRoster(publish func(Report)) *roster {
	return &roster{publish: publish, answers: make(chan answer)}
}

// follow runs session, which talks to the runtime over one connection, again and
// again until ctx ends, and reports why each one ended. A runtime that was never
// there is not an error.
func (r *roster) follow(ctx context.Context, session func(context.Context) error) {
	retry(ctx, func(ctx context.Context) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel() // ends what the session has asked
		r.records, r.asked = make(map[string]Record), make(map[string]int)
		err := session(ctx)
		absent := errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED)
		switch {
		case ctx.Err() != nil:
		case r.listed, !absent:
			r.publish(Report{Err: err})
		case !r.none:
			r.none = true
			r.publish(Report{Partial: true})
		}
	})
}

// retry runs session again and again until ctx ends, after a pause that
// doubles while sessions end at once.
func retry(ctx context.Context, session func(context.Context)) {
	pause := minBackOff
	for ctx.Err() == nil {
		start := time.Now()
		session(ctx)
		if time.Since(start) > maxBackOff {
			pause = minBackOff
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, maxBackOff)
	}
}

// listens says whether somebody listens at a unix socket; the runtimes' clients
// do not say why they cannot connect.
func listens(ctx context.Context, path string) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	return conn.Close()
}

// ask inspects a container; the answer arrives in answers.
func (r *roster) ask(ctx context.Context, key string, look inspect) {
	r.last++
	asked := r.last
	r.asked[key] = asked
	go func() {
		got := answer{key: key, asked: asked}
		call, cancel := context.WithTimeout(ctx, callTimeout)
		got.record, got.runs, got.err = look(call, key)
		cancel()
		select {
		case r.answers <- got:
		case <-ctx.Done():
		}
	}()
}

// knows says whether a container runs or is being asked about.
func (r *roster) knows(key string) bool {
	_, runs := r.records[key]
	_, open := r.asked[key]
	return runs || open
}

// take records an answer, and reports the resulting list.
func (r *roster) take(got answer) {
	if r.note(got) {
		r.say()
	}
}

// note records an answer, unless there was a later question or an end since. It
// says whether the list may have changed.
func (r *roster) note(got answer) bool {
	if r.asked[got.key] != got.asked {
		return false
	}
	delete(r.asked, got.key)
	switch {
	case got.err != nil:
		return false // the next list will tell
	case got.runs:
		r.records[got.key] = got.record
	default:
		delete(r.records, got.key)
	}
	return true
}

// end records that a container has ended.
func (r *roster) end(key string) {
	delete(r.asked, key) // the answer will be out of date
	// An event may be older than a list, and the container may have been started
	// again since.
	if rec, runs := r.records[key]; runs && unix.Kill(rec.PID, 0) != nil {
		delete(r.records, key)
		r.say()
	}
}

// replace takes the keys of all containers that run. It inspects those that are
// not known, or whose record current says is outdated, and waits for the answers,
// but not for long: later answers count, too.
func (r *roster) replace(ctx context.Context, keys []string, current func(key string, rec Record) bool, look inspect) {
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
	records := make(map[string]Record, len(keys))
	for _, key := range keys[:min(len(keys), maxRecords)] {
		if rec, ok := r.records[key]; ok && current(key, rec) {
			records[key] = rec
		} else {
			r.ask(ctx, key, slowly)
		}
	}
	r.records = records
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
	r.publish(Report{Records: slices.Collect(maps.Values(r.records)), Partial: len(r.asked) > 0})
	r.listed = true
}

// wrap says which runtime an error is about.
func wrap(name, addr string, err error) error {
	if err == nil {
		err = errors.New("connection ended")
	}
	return fmt.Errorf("%s at %s: %w", name, addr, err)
}
