package api

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strconv"
	"strings"
)

// streamed is one event of a stream. ID grows by any number from one to the next.
type streamed struct {
	ID   uint64
	Name string // of the event; "" is "message"
	Data any
}

// StreamState is the first event of a stream, named state.
type StreamState struct {
	Readers int `json:"readers" doc:"who read such streams now, this one included"`
	Dropped int `json:"dropped" doc:"how many were dropped since the agent began, as they read too slowly"`
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
