package serve

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// teller is a backend with events. It remembers the last few.
type teller struct {
	backend
	mu       sync.Mutex
	from     uint64 // the oldest event that it remembers
	last     uint64
	text     string
	happened chan struct{}
}

func (b *teller) tell(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last += uint64(n)
	close(b.happened)
	b.happened = make(chan struct{})
}

func (b *teller) Command(ctx context.Context, ask api.Ask) (any, error) {
	after, ok := ask.Body.(api.BlockIOEventsAfter)
	if !ok {
		return b.backend.Command(ctx, ask)
	}
	for {
		b.mu.Lock()
		var out []api.BlockIOEvent
		for id := max(uint64(after)+1, b.from); id <= b.last; id++ {
			out = append(out, api.BlockIOEvent{ID: id, Text: b.text})
		}
		happened := b.happened
		b.mu.Unlock()
		if len(out) > 0 {
			return out, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-happened:
		}
	}
}

func newTeller() *teller { return &teller{from: 1, last: 2, happened: make(chan struct{})} }

// A reader gets the remembered events, then new ones. A later reader goes on after the last event
// that it has, and learns what it has missed. A stream ends with its context.
func TestFollow(t *testing.T) {
	b := newTeller()
	c := api.Dial(served(t, b, 0o660, Serve))
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	var got []uint64
	for e, err := range c.FollowBlockIO(ctx, 0, nil) {
		testkit.Must(t, err)
		if got = append(got, e.ID); len(got) == 2 {
			b.tell(2)
		}
		if len(got) == 4 {
			break
		}
	}
	if !slices.Equal(got, []uint64{1, 2, 3, 4}) {
		t.Errorf("events %v", got)
	}
	b.mu.Lock()
	b.from, b.last = 8, 9
	b.mu.Unlock()
	var missed uint64
	for e, err := range c.FollowBlockIO(ctx, 4, func(n uint64) { missed = n }) {
		if err != nil || e.ID != 8 || missed != 3 {
			t.Errorf("after 4: %+v, %v, missed %d, want 8 and 3", e, err, missed)
		}
		break
	}
}

// rawStream opens a stream by hand.
func rawStream(t *testing.T, socket, header string) (net.Conn, *bufio.Reader) {
	t.Helper()
	c := testkit.Opened(net.Dial("unix", socket))(t)
	fmt.Fprintf(c, "GET /v1/blockio/events HTTP/1.1\r\nHost: x\r\n%s\r\n", header)
	return c, bufio.NewReader(c)
}

func firstState(t *testing.T, socket string) (s api.StreamState) {
	t.Helper()
	c, r := rawStream(t, socket, "Last-Event-ID: 1000\r\n") // beyond all, which are large
	defer c.Close()
	resp, err := http.ReadResponse(r, nil)
	testkit.Must(t, err)
	for lines := bufio.NewScanner(resp.Body); lines.Scan() && lines.Text() != ""; {
		switch field, value, _ := strings.Cut(lines.Text(), ": "); field {
		case "event":
			testkit.Same(t, "the first event", "state", value)
		case "data":
			testkit.Check(t, json.Unmarshal([]byte(value), &s))
		}
	}
	return s
}

// A client that does not read is dropped and counted, and blocks no other. maxReaders limits the
// readers, and a bad Last-Event-ID is refused.
func TestReaders(t *testing.T) {
	b := newTeller()
	b.text = strings.Repeat("x", 1<<16)
	socket := served(t, b, 0o660, Serve)
	_, r := rawStream(t, socket, "Last-Event-ID: -1\r\n")
	if resp, err := http.ReadResponse(r, nil); err != nil || resp.StatusCode != http.StatusBadRequest {
		t.Errorf("a bad id: %v, %v", resp, err)
	}
	rawStream(t, socket, "") // never read
	b.tell(200)              // more than a socket buffer holds
	testkit.Await(t, "it is dropped", func() bool { return firstState(t, socket).Dropped > 0 })

	b.mu.Lock()
	b.text = ""
	b.mu.Unlock()
	for range maxReaders {
		_, r := rawStream(t, socket, "")
		testkit.Must(t, testkit.Err(http.ReadResponse(r, nil)))
	}
	testkit.Await(t, "there is no place", func() bool { // former readers may not have left yet
		_, r = rawStream(t, socket, "")
		resp, err := http.ReadResponse(r, nil)
		testkit.Must(t, err)
		return resp.StatusCode == http.StatusServiceUnavailable
	})
}

// The server ends its streams at once when it ends: it does not wait for them.
func TestStreamsEnd(t *testing.T) {
	b := newTeller()
	end, stop := context.WithCancel(t.Context())
	rs := &readers{end: end}
	stop()
	w := &pipeWriter{header: http.Header{}}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://x/", nil)
	testkit.Must(t, err)
	err = rs.serve(w, r, nil, func(ctx context.Context, after uint64) ([]streamed, error) {
		return followBlockIO(b, r.WithContext(ctx), max(after, 2))
	})
	if err != nil || rs.open != 0 || !strings.Contains(w.String(), `{"readers":1,"dropped":0}`) {
		t.Errorf("%v, %d open, %q", err, rs.open, w.String())
	}
}

type pipeWriter struct {
	strings.Builder
	header http.Header
}

func (w *pipeWriter) Header() http.Header { return w.header }

func (w *pipeWriter) WriteHeader(int) {}

func (w *pipeWriter) Flush() {}

func (w *pipeWriter) SetWriteDeadline(time.Time) error { return nil }
