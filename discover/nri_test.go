package discover

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// nriRecorded are what a runtime has said that had this version of github.com/containerd/nri: it registers a plugin, and
// starts c1 (of a pod with annotations of ours), plain, c2 (with labels of ours), hang and after (both of a pod with those).
var nriRecorded = []string{"testdata/nri-0.8.0", "testdata/nri-0.12.5"}

// TestHoldStarts plays what a runtime has said. A start with policy waits until it is ready, for a bounded time, and after
// one that takes too long none does.
func TestHoldStarts(t *testing.T) {
	for _, file := range nriRecorded {
		t.Run(file, func(t *testing.T) {
			recorded, err := os.ReadFile(file)
			must(t, err)
			at := filepath.Join(t.TempDir(), "nri.sock")
			l, err := net.Listen("unix", at)
			must(t, err)
			defer l.Close()
			var held []string
			asked, ready := make(chan string), make(chan error)
			stop := testkit.Background(t, func(ctx context.Context) error {
				(&nri{addr: at, log: slog.New(slog.DiscardHandler), now: testkit.NewClock().Now, ready: func(ctx context.Context, id string) error {
					if until, ok := ctx.Deadline(); !ok || time.Until(until) > startWait { // it has started
						<-ctx.Done()
						return ctx.Err()
					}
					asked <- id
					return <-ready
				}}).run(ctx)
				return nil
			})
			conn := registered(t, l)
			said, replies := messages{r: bytes.NewReader(recorded)}, make(chan string)
			go func() {
				for from := (messages{r: conn}); ; {
					m, err := from.next()
					if err != nil {
						close(replies)
						return
					}
					replies <- string(m.body)
				}
			}()
			var got []string
			for m, err := said.next(); !errors.Is(err, io.EOF); m, err = said.next() {
				must(t, err)
				must(t, m.send(conn))
				for answered := m.channel == nriCalls; !answered; {
					select {
					case reply := <-replies:
						got, answered = append(got, reply), true
					case id := <-asked:
						held = append(held, id)
						select {
						case <-replies:
							t.Errorf("%s starts before it is ready", id)
						default:
						}
						if id == "hang" {
							ready <- context.DeadlineExceeded
						} else {
							ready <- nil
						}
					}
				}
			}
			testkit.Same(t, "held", []string{"c1", "c2", "hang"}, held)
			testkit.Same(t, "answers", []string{"\x12\x02\x10\x20", "\x12\x02\x10\x00", "\x12\x00", "\x12\x00", "\x12\x00", "\x12\x00", "\x12\x00"}, got)
			conn.Close()
			registered(t, l).Close() // with the runtime that follows
			must(t, stop())
		})
	}
}

// TestQueueOfStarts has 200 starts wait for each other: together they are held for half a second, and the next queue
// likewise. After one that took so long none is held until that one is ready.
func TestQueueOfStarts(t *testing.T) {
	start := text(2, string(text(1, "c1"))+string(text(5, string(text(1, "fairlead.netcpu")))))
	synctest.Test(t, func(t *testing.T) {
		var takes atomic.Int64 // read by the wait for one that has started, too
		takes.Store(int64(startWait / 5))
		held := 0
		n := &nri{now: time.Now, wait: startWait, log: slog.New(slog.DiscardHandler)}
		n.ready = func(ctx context.Context, _ string) error {
			if until, _ := ctx.Deadline(); time.Until(until) <= startWait {
				held++
			}
			select {
			case <-time.After(time.Duration(takes.Load())):
			case <-ctx.Done():
			}
			return ctx.Err()
		}
		queue := func(starts int, took time.Duration, want int) {
			t.Helper()
			began := time.Now()
			held = 0
			for range starts {
				n.called(t.Context(), "StartContainer", start)
			}
			if got := time.Since(began); got != took || held != want {
				t.Errorf("%d of %d starts are held for %v, want %d for %v", held, starts, got, want, took)
			}
			time.Sleep(2 * startQueue)
		}
		queue(200, startWait, 5)
		queue(200, startWait, 5)
		takes.Store(int64(2 * startWait))
		queue(1, startWait, 1)
		queue(200, 0, 0)
		time.Sleep(2 * startWait)
		takes.Store(int64(startWait / 5))
		queue(200, startWait, 5)
	})
}

// registered accepts a plugin that registers.
func registered(t *testing.T, l net.Listener) net.Conn {
	t.Helper()
	conn, err := l.Accept()
	must(t, err)
	m, err := (&messages{r: conn}).next()
	must(t, err)
	if want := "\n\x1cnri.pkg.api.v1alpha1.Runtime\x12\x0eRegisterPlugin"; m.channel != nriCalls || !strings.HasPrefix(string(m.body), want) {
		t.Fatalf("%d: %q, want %q", m.channel, m.body, want)
	}
	return conn
}

func FuzzNRI(f *testing.F) {
	for _, file := range nriRecorded {
		recorded, err := os.ReadFile(file)
		must(f, err)
		f.Add(recorded)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		from := messages{r: bytes.NewReader(b)}
		for {
			m, err := from.next()
			if err != nil {
				if m.body != nil {
					t.Errorf("%+v with %v", m, err)
				}
				return
			}
			all, err := fieldsOf(m.body)
			if err != nil && all != nil {
				t.Errorf("%+v with %v", all, err)
			}
			request, _ := fieldsOf(all.of(3).bytes)
			for _, pod := range []int32{1, 2} {
				if id := starting(request, protowire.Number(pod)); len(id) > len(b) {
					t.Errorf("id %q", id)
				}
			}
		}
	})
}
