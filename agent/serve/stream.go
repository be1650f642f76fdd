package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// The bounds of server-sent events (WHATWG HTML, section 9.2). The server keeps nothing for a
// reader: it sends the events that the Backend still remembers, and how many the reader has missed.
const (
	maxReaders  = 32               // of one socket at a time
	readerPause = 2 * time.Second  // a reader that does not take in an event within this time is dropped
	streamBeat  = 15 * time.Second // after this time without an event, a reader is sent a comment
)

// streamed is one event of a stream. IDs increase by any amount from one event to the next.
type streamed struct {
	ID   uint64
	Name string // of the event; "" is "message"
	Data any
}

// readers are the clients that read streams of one socket.
type readers struct {
	end context.Context // of the server

	mu            sync.Mutex
	open, dropped int
}

func (rs *readers) enter() (api.StreamState, error) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if rs.open == maxReaders {
		return api.StreamState{}, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: fmt.Sprintf("%d already follow events: there is place for no more", maxReaders)}
	}
	rs.open++
	return api.StreamState{Readers: rs.open, Dropped: rs.dropped}, nil
}

func (rs *readers) leave(slow bool) (dropped int) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.open--
	if slow {
		rs.dropped++
	}
	return rs.dropped
}

// serve sends the events that next returns after an id, until the client or the server ends. next
// waits while there are none, or until its context ends.
func (rs *readers) serve(w http.ResponseWriter, r *http.Request, log *slog.Logger, next func(ctx context.Context, after uint64) ([]streamed, error)) error {
	after, err := lastEvent(r)
	if err != nil {
		return err
	}
	state, err := rs.enter()
	if err != nil {
		return err
	}
	slow := false
	defer func() {
		if n := rs.leave(slow); slow {
			log.Warn("a reader of events was dropped, as it reads too slowly", "dropped", n)
		}
	}()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(rs.end, cancel)()
	out := http.NewResponseController(w)
	send := func(text string) bool {
		out.SetWriteDeadline(time.Now().Add(readerPause))
		_, err := io.WriteString(w, text)
		if err == nil {
			err = out.Flush()
		}
		slow = slow || errors.Is(err, os.ErrDeadlineExceeded)
		return err == nil
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	for ok := send(streamed{after, "state", state}.text()); ok && ctx.Err() == nil; {
		beat, stop := context.WithTimeout(ctx, streamBeat)
		events, err := next(beat, after)
		stop()
		if err != nil && ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) {
			send(streamed{after, "error", api.Failure{Error: api.Error{Code: "internal", Text: err.Error()}}}.text())
			return nil // the status has been sent already
		}
		text := ": nothing new\n\n"
		for i, e := range events {
			if after = e.ID; i == 0 {
				text = ""
			}
			text += e.text()
		}
		ok = ctx.Err() == nil && send(text)
	}
	return nil
}

// lastEvent returns the id of the last event that a reader has: the header Last-Event-ID, as in the
// standard.
func lastEvent(r *http.Request) (uint64, error) {
	text := r.Header.Get("Last-Event-ID")
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: fmt.Sprintf("Last-Event-ID %q is no number", text)}
	}
	return n, nil
}

func (e streamed) text() string {
	data, err := json.Marshal(e.Data)
	if err != nil {
		data, _ = json.Marshal(api.Failure{Error: api.Error{Code: "internal", Text: err.Error()}})
	}
	name := ""
	if e.Name != "" {
		name = "event: " + e.Name + "\n"
	}
	return fmt.Sprintf("%sid: %d\ndata: %s\n\n", name, e.ID, data)
}
