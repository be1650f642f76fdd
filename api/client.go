package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// ErrNoAgent is wrapped by the errors of a Client if no agent answers at its socket.
var ErrNoAgent = errors.New("no agent answers")

// maxAnswer bounds what a Client reads of one answer.
const maxAnswer = 64 << 20

// Client queries and commands one agent. It is safe for concurrent use. An answer other than 2xx is
// an *[Error].
type Client struct {
	socket string
	http   http.Client
}

// Dial returns a Client of the agent at a unix socket. It connects at the first request, so an
// absent agent is an error of that request.
func Dial(socket string) *Client {
	var d net.Dialer
	return &Client{socket: socket, http: http.Client{
		Timeout: time.Minute,
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				c, err := d.DialContext(ctx, "unix", socket)
				if errors.Is(err, fs.ErrPermission) {
					if v, verr := d.DialContext(ctx, "unix", ViewSocket(socket)); verr == nil {
						return v, nil
					}
				}
				return c, err
			},
			MaxIdleConns:    2,
			IdleConnTimeout: 30 * time.Second,
		},
	}}
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Containers lists the running containers, sorted by name.
func (c *Client) Containers(ctx context.Context) (out []Container, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/containers", nil, &out)
}

// Explain returns what was done to one container. ref is its runtime id, its name, its id, or a
// prefix of at least 4 characters of its runtime id or name. With "id:" before a number it is an
// id, even if a container has such a name.
func (c *Client) Explain(ctx context.Context, ref string) (out Explanation, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/containers/"+url.PathEscape(ref)+"/explain", nil, &out)
}

// Plan returns what features would change for one container, named as for Explain.
func (c *Client) Plan(ctx context.Context, ref string) (out []Planned, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/containers/"+url.PathEscape(ref)+"/plan", nil, &out)
}

// Doctor returns what the agent's host can do.
func (c *Client) Doctor(ctx context.Context) (out Report, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/doctor", nil, &out)
}

// Status returns the state of the agent.
func (c *Client) Status(ctx context.Context) (out Status, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/status", nil, &out)
}

// Samples returns the measurements of the features.
func (c *Client) Samples(ctx context.Context) (out Samples, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/samples", nil, &out)
}

// Version returns the versions of the agent and its API.
func (c *Client) Version(ctx context.Context) (out Version, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/version", nil, &out)
}

// Reload makes the agent read its policy again. It also ends the hold of Restore. The answer, not
// the error, reports invalid policy.
func (c *Client) Reload(ctx context.Context) (out PolicyStatus, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/policy/reload", nil, &out)
}

// Restore undoes what is applied to one container, or to all if ref is "". The agent does not apply
// it again until the next reload.
func (c *Client) Restore(ctx context.Context, ref string) (out Restored, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/restore", RestoreRequest{Container: ref}, &out)
}

// Set sets values for a running container that override files and labels, and clears such values:
// all of them or none. ref is as for Explain, but a prefix of a name needs "…" at its end. The
// answer is the resulting state of the container.
func (c *Client) Set(ctx context.Context, ref string, in SetRequest) (out Container, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/containers/"+url.PathEscape(ref)+"/set", in, &out)
}

// Self returns what the calling container may know about itself. It works only on the agent's self
// socket.
func (c *Client) Self(ctx context.Context) (out Self, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/self", nil, &out)
}

// report requests a feature's report over a time: about one container, or all if ref is "".
func (c *Client) report(ctx context.Context, feature, ref string, over time.Duration, out any) error {
	query := url.Values{}
	if over != 0 {
		query.Set("over", over.String())
	}
	return c.ask(ctx, feature, ref, query, out)
}

// ask is report with all parameters that a route may have.
func (c *Client) ask(ctx context.Context, feature, ref string, query url.Values, out any) error {
	path := "/v1/" + feature
	if ref != "" {
		path = "/v1/containers/" + url.PathEscape(ref) + "/" + feature
	}
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	return c.do(ctx, http.MethodGet, path, nil, out)
}

func (c *Client) do(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("encode request %s: %w", path, err)
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://fairlead"+path, body)
	if err != nil {
		return fmt.Errorf("make request %s: %w", path, err)
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.send(&c.http, req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer))
	if err := dec.Decode(out); err != nil {
		return fmt.Errorf("read the agent's answer to %s: %w", path, err)
	}
	return nil
}

// send sends a request, and returns a 2xx answer. The caller closes its body.
func (c *Client) send(by *http.Client, req *http.Request) (*http.Response, error) {
	resp, err := by.Do(req)
	if err != nil {
		// The cause alone: the URL around it means nothing on a unix socket.
		if ue := (*url.Error)(nil); errors.As(err, &ue) {
			err = ue.Err
		}
		if oe := (*net.OpError)(nil); errors.As(err, &oe) && oe.Op == "dial" {
			if errors.Is(err, fs.ErrPermission) {
				return nil, fmt.Errorf("connect to the agent at %s: %w: it is for root and the group %s", c.socket, fs.ErrPermission, Group)
			}
			return nil, fmt.Errorf("%w at %s: %w", ErrNoAgent, c.socket, oe.Err)
		}
		if te := (net.Error)(nil); errors.As(err, &te) && te.Timeout() && req.Context().Err() == nil {
			return nil, fmt.Errorf("the agent at %s has not answered for %v", c.socket, by.Timeout)
		}
		return nil, fmt.Errorf("ask the agent at %s: %w", c.socket, err)
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer resp.Body.Close()
	var f Failure
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&f); err != nil || f.Error.Text == "" {
		return nil, &Error{Status: resp.StatusCode, Code: "internal", Text: "the agent answered " + resp.Status}
	}
	return nil, &f.Error
}

// StreamState is the first event of a stream, named state.
type StreamState struct {
	Readers int `json:"readers" doc:"who read such streams now, this one included"`
	Dropped int `json:"dropped" doc:"how many were dropped since the agent began, as they read too slowly"`
}

// maxEvent bounds the length of a line in a stream.
const maxEvent = 1 << 20

// follow reads the stream at a path, from the event after an id. It passes the name of each event,
// "" for "message", and its data to take, until take returns false, or ctx or the stream ends.
func (c *Client) follow(ctx context.Context, path string, after uint64, take func(name string, data []byte) bool) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://fairlead"+path, nil)
	if err != nil {
		return fmt.Errorf("make request %s: %w", path, err)
	}
	if after > 0 {
		req.Header.Set("Last-Event-ID", strconv.FormatUint(after, 10))
	}
	endless := http.Client{Transport: c.http.Transport} // without a Timeout
	resp, err := c.send(&endless, req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := parseStream(resp.Body, take); err != nil {
		return fmt.Errorf("read events of the agent at %s: %w", c.socket, err)
	}
	return nil
}

// parseStream passes each event to take until take returns false. As the standard requires, it
// ignores comments and unknown fields, and drops an event that the end of the stream cuts off.
func parseStream(r io.Reader, take func(name string, data []byte) bool) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxEvent)
	var name string
	var data []byte // with a line break in front of each line
	for lines.Scan() {
		line := lines.Text()
		if line == "" {
			if data != nil && !take(name, data[1:]) {
				return nil
			}
			name, data = "", nil
			continue
		}
		field, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "event":
			name = value
		case "data":
			data = append(append(data, '\n'), value...)
			if len(data)-1 > maxEvent {
				return bufio.ErrTooLong
			}
		}
	}
	return lines.Err()
}

// Text returns the text of an error for people. Some errors of Go's library name its functions, or
// say what only programmers understand: Text rephrases these, and leaves the rest of the text
// unchanged.
func Text(err error) string {
	if err == nil {
		return ""
	}
	text := err.Error()
	for _, part := range parts(err, nil) {
		if said := wordsFor(part); said != "" {
			text = strings.ReplaceAll(text, part.Error(), said)
		}
	}
	return text
}

// parts appends err and all errors that it wraps, the outermost first.
func parts(err error, list []error) []error {
	list = append(list, err)
	switch x := err.(type) {
	case interface{ Unwrap() error }:
		if inner := x.Unwrap(); inner != nil {
			return parts(inner, list)
		}
	case interface{ Unwrap() []error }:
		for _, inner := range x.Unwrap() {
			list = parts(inner, list)
		}
	}
	return list
}

// wordsFor returns the text for one of Go's errors, or "" for any other.
func wordsFor(err error) string {
	if x, ok := err.(*strconv.NumError); ok {
		what := "a whole number"
		switch {
		case errors.Is(x.Err, strconv.ErrRange):
			return fmt.Sprintf("%q is out of range", x.Num)
		case x.Func == "ParseBool":
			what = "true or false"
		case x.Func == "ParseFloat":
			what = "a number"
		}
		return fmt.Sprintf("%q is not %s", x.Num, what)
	}
	switch err {
	case context.Canceled:
		return "interrupted"
	case context.DeadlineExceeded:
		return "it took too long"
	case io.ErrUnexpectedEOF, io.EOF:
		return "the connection was closed"
	}
	return ""
}
