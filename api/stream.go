package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// The bounds of server-sent events (WHATWG HTML, section 9.2). Nothing is kept for a
// reader: it is given what the Backend still remembers, and told what it has missed.
const (
	maxReaders  = 32               // at a time, of one socket
	readerPause = 2 * time.Second  // in which a reader has to take in what it is sent, else it is dropped
	streamBeat  = 15 * time.Second // in so long without an event, a reader is sent a comment
)

// streamed is one event of a stream. ID grows by any number from one to the next.
type streamed struct {
	ID   uint64
	Name string // of the event; "" is "message"
	Data any
}

// readers are those who read streams of one socket.
type readers struct {
	end <-chan struct{} // closed when the server ends

	mu            sync.Mutex
	open, dropped int
}

// StreamState is the first event of a stream, named state.
type StreamState struct {
	Readers int `json:"readers" doc:"who read such streams now, this one included"`
	Dropped int `json:"dropped" doc:"how many were dropped since the agent began, as they read too slowly"`
}

func (rs *readers) enter() (StreamState, error) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if rs.open == maxReaders {
		return StreamState{}, &Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: fmt.Sprintf("%d already follow events: there is place for no more", maxReaders)}
	}
	rs.open++
	return StreamState{rs.open, rs.dropped}, nil
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

// serve sends what next gives after an id, until the client or the server ends. next waits
// for as long as there is nothing, or until its context ends.
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
	go func() {
		select {
		case <-rs.end:
			cancel()
		case <-ctx.Done():
		}
	}()
	out := http.NewResponseController(w)
	send := func(text string) bool {
		out.SetWriteDeadline(time.Now().Add(readerPause))
		_, err := io.WriteString(w, text)
		if err == nil {
			err = out.Flush()
		}
		slow = slow || isTimeout(err)
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
			send(streamed{after, "error", Failure{Error: Error{Code: "internal", Text: err.Error()}}}.text())
			return nil // the status has been told
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

func isTimeout(err error) bool {
	t := interface{ Timeout() bool }(nil)
	return errors.As(err, &t) && t.Timeout()
}

// lastEvent is where a reader goes on: the header Last-Event-ID, as the standard has it.
func lastEvent(r *http.Request) (uint64, error) {
	text := r.Header.Get("Last-Event-ID")
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, &Error{Status: http.StatusBadRequest, Code: "bad_request", Text: fmt.Sprintf("Last-Event-ID %q is no number", text)}
	}
	return n, nil
}

func (e streamed) text() string {
	data, err := json.Marshal(e.Data)
	if err != nil {
		data, _ = json.Marshal(Failure{Error: Error{Code: "internal", Text: err.Error()}})
	}
	name := ""
	if e.Name != "" {
		name = "event: " + e.Name + "\n"
	}
	return fmt.Sprintf("%sid: %d\ndata: %s\n\n", name, e.ID, data)
}

// maxEvent bounds a line of a stream that a Client reads.
const maxEvent = 1 << 20

// follow reads a stream of a path from the event after an id on, until ctx ends or the
// stream does. Every event's data is in JSON.
func (c *Client) follow(ctx context.Context, path string, after uint64) iter.Seq2[streamed, error] {
	return func(yield func(streamed, error) bool) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://fairlead"+path, nil)
		if err != nil {
			yield(streamed{}, fmt.Errorf("make request %s: %w", path, err))
			return
		}
		if after > 0 {
			req.Header.Set("Last-Event-ID", strconv.FormatUint(after, 10))
		}
		endless := http.Client{Transport: c.http.Transport} // without a Timeout
		resp, err := c.send(&endless, req)
		if err != nil {
			yield(streamed{}, err)
			return
		}
		defer resp.Body.Close()
		if err := parseStream(resp.Body, func(e streamed) bool { return yield(e, nil) }); err != nil {
			yield(streamed{}, fmt.Errorf("read events of the agent at %s: %w", c.socket, err))
		}
	}
}

// parseStream gives each event to take, until that says no. Fields of which nothing is
// known, and comments, are left out, as the standard has it. At the end of the stream,
// an event without its empty line is none.
func parseStream(r io.Reader, take func(streamed) bool) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxEvent)
	var e streamed
	var data []byte
	for lines.Scan() {
		line := lines.Text()
		if line == "" {
			if data != nil {
				if e.Data = json.RawMessage(data); !take(e) {
					return nil
				}
			}
			e, data = streamed{ID: e.ID}, nil
			continue
		}
		field, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "id":
			n, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				return fmt.Errorf("event with the id %q", value)
			}
			e.ID = n
		case "event":
			e.Name = value
		case "data":
			if data != nil {
				data = append(data, '\n')
			}
			if data = append(data, value...); data == nil {
				data = []byte{}
			}
			if len(data) > maxEvent {
				return bufio.ErrTooLong
			}
		}
	}
	return lines.Err()
}
