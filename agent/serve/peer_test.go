package serve

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// Containers that open connections and send nothing must not lock out the others for long.
func TestSelfSocketIsLetGo(t *testing.T) {
	b := &backend{callers: func(n uint64) api.ID { return api.ID(n/maxOfOne + 1) }}
	socket := served(t, b, 0o666, ServeSelf)
	for range maxSelves {
		c, err := net.Dial("unix", socket)
		testkit.Must(t, err)
		defer c.Close()
	}
	c := api.Dial(socket)
	defer c.Close()
	if s, err := c.Self(t.Context()); err != nil || s.ID != 9 {
		t.Errorf("self: %+v, %v", s, err)
	}
}

// A connection beyond a container's limit is closed at once, before anything is read from it.
func TestSelfSocketRefuses(t *testing.T) {
	socket := served(t, &backend{}, 0o666, ServeSelf)
	var last net.Conn
	for range 2 * maxOfOne {
		c, err := net.Dial("unix", socket)
		testkit.Must(t, err)
		defer c.Close()
		last = c
	}
	last.Write([]byte("GET /v1/self HTTP/1.1\r\nHost: x\r\n\r\n"))
	if n, err := last.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes come back on a connection too many", n)
	}
}

func TestGuests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ids := map[int]api.ID{1: 7, 2: 7, 3: 8}
		var log bytes.Buffer
		g := newGuests(func(p Peer) api.ID { return ids[p.PID] }, slog.New(slog.NewTextHandler(&log, nil)))
		left := 0
		come := func(pid int, err error) (*visitor, bool) {
			v := &visitor{Conn: nowhere{}, peer: Peer{PID: pid, FD: -1}, err: err, leave: func() { left++ }}
			return v, g.admit(v)
		}
		var in []*visitor
		for i := range maxOfOne {
			v, ok := come(1+i%2, nil)
			if !ok {
				t.Fatalf("visitor %d is not let in", i)
			}
			in = append(in, v)
		}
		if _, ok := come(2, nil); ok {
			t.Error("one container has more connections than it may")
		}
		come(2, nil)
		if n := strings.Count(log.String(), "refused"); n != 1 || !strings.Contains(log.String(), "container="+api.ID(7).String()) {
			t.Errorf("of two connections too many the log says %q", &log)
		}
		other, ok := come(3, nil)
		if !ok {
			t.Error("another container is kept out")
		}
		for i := range 2 * maxOfOne { // in no known container, or without a peer
			var err error
			if i%2 == 0 {
				err = errors.New("no peer")
			}
			if _, ok := come(4, err); ok != (i < maxOfOne) {
				t.Errorf("stranger %d: %v", i, ok)
			}
		}
		in[0].Close()
		in[0].Close()
		if v, ok := come(1, nil); !ok || left != 1 {
			t.Errorf("after one has left: %v, %d have left", ok, left)
		} else {
			in[0] = v
		}

		// Answers to one container are paced; an answer to another comes at once.
		began := time.Now()
		for _, v := range []*visitor{in[0], in[1], other, in[2]} {
			testkit.Must(t, testkit.Err(turn(withPeer(t.Context(), v))))
		}
		testkit.Same(t, "four answers took", 2*selfPause, time.Since(began))
		gone, cancel := context.WithCancel(withPeer(t.Context(), in[0]))
		cancel()
		testkit.Is(t, "who has gone waits for an answer", testkit.Err(turn(gone)), context.Canceled)

		for _, v := range append(in, other) {
			v.Close()
		}
		come(3, nil)
		if g.of[7] == nil {
			t.Error("by connecting anew a container has its next answer sooner")
		}
		time.Sleep(time.Second)
		come(3, nil)
		if g.of[7] != nil {
			t.Error("a container that has left is never forgotten")
		}
	})
}

// nowhere is a connection to close.
type nowhere struct{ net.Conn }

func (nowhere) Close() error { return nil }

// A loop of connections costs the agent only guestPause's rate, whichever containers make them.
func TestGuestPace(t *testing.T) {
	g := newGuests(nil, slog.New(slog.DiscardHandler))
	start := time.Now()
	now := start
	for i := range 10_000 {
		wait := g.wait(now)
		if i < guestBurst && wait != 0 {
			t.Fatalf("connection %d waits for %v", i, wait)
		}
		now = now.Add(wait)
	}
	if took, want := now.Sub(start), (10_000-guestBurst)*guestPause; took != want {
		t.Errorf("10,000 connections at once take %v, want %v", took, want)
	}
	testkit.Same(t, "an hour later one waits for", 0, g.wait(now.Add(time.Hour)))

	path := filepath.Join(t.TempDir(), "self")
	inner, err := net.Listen("unix", path)
	testkit.Must(t, err)
	defer inner.Close()
	g = newGuests(func(Peer) api.ID { return 0 }, slog.New(slog.DiscardHandler))
	l := visitors{Listener: inner, places: make(chan struct{}, maxSelves), guests: g}
	const many = guestBurst + 100
	held := make(chan net.Conn, many)
	go func() {
		for range many {
			c, err := net.Dial("unix", path)
			if err != nil {
				return
			}
			held <- c
		}
	}()
	start = time.Now()
	for range many {
		c, err := l.Accept()
		testkit.Must(t, err)
		c.Close()
		(<-held).Close()
	}
	if took := time.Since(start); took < 90*guestPause { // a little less than the pauses beyond the burst
		t.Errorf("%d connections were let in within %v", many, took)
	}

	// The log has one warning. On a busy machine the connections above come too slowly to wait.
	var log bytes.Buffer
	g = newGuests(func(Peer) api.ID { return 0 }, slog.New(slog.NewTextHandler(&log, nil)))
	for range guestBurst + 10 {
		g.wait(start)
	}
	if n := strings.Count(log.String(), "connections wait"); n != 1 {
		t.Errorf("the log says %q", &log)
	}
}

// A caller that has hung up before its turn is not looked up.
func TestGuestsWhoHaveGone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "self")
	inner, err := net.Listen("unix", path)
	testkit.Must(t, err)
	defer inner.Close()
	asked := 0
	g := newGuests(func(Peer) api.ID { asked++; return 7 }, slog.New(slog.DiscardHandler))
	l := visitors{Listener: inner, places: make(chan struct{}, 2), guests: g}
	var last net.Conn
	for n := range 20 {
		if last, err = net.Dial("unix", path); err != nil {
			t.Fatal(err)
		}
		defer last.Close()
		if n < 19 {
			last.Write([]byte("GET /v1/self HTTP/1.1\r\n\r\n")) // unread
			last.Close()
		}
	}
	c, err := l.Accept()
	testkit.Must(t, err)
	defer c.Close()
	last.Write([]byte("x"))
	if n, err := c.Read(make([]byte, 8)); n != 1 || err != nil || asked != 1 || len(l.places) != 1 {
		t.Errorf("%d bytes, %v; %d were looked up, %d are in", n, err, asked, len(l.places))
	}
}
