package metrics

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead-project/fairlead/feature"
)

// counted is a listener that notes how many of its connections were open at a time. It takes them for
// connections from the addresses in from, if that is not nil.
type counted struct {
	net.Listener
	from       chan string
	mu         sync.Mutex
	open, most int
}

type countedConn struct {
	net.Conn
	from   net.Addr
	closed func()
}

func (c *countedConn) RemoteAddr() net.Addr { return c.from }

func (c *countedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

func (l *counted) add(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open += n
	l.most = max(l.most, l.open)
}

func (l *counted) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.add(1)
	from := c.RemoteAddr()
	if l.from != nil {
		from = &net.TCPAddr{IP: net.ParseIP(<-l.from), Port: 1}
	}
	return &countedConn{c, from, sync.OnceFunc(func() { l.add(-1) })}, nil
}

// Clients that keep their connections take no more than maxClients places, and all the
// others get theirs in turn.
func TestManyClients(t *testing.T) {
	inner, err := Listen("127.0.0.1:0")
	must(t, err)
	l := &counted{Listener: inner}
	go Serve(t.Context(), l, example(), "", slog.New(slog.DiscardHandler))
	var clients []net.Conn
	for range 4 * maxClients {
		c, err := net.Dial("tcp", l.Addr().String())
		must(t, err)
		defer c.Close()
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		clients = append(clients, c)
	}
	for i, c := range clients {
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("client %d: %v, %v", i, resp, err)
		}
		c.Close()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.most > maxClients {
		t.Errorf("%d connections were open at a time, want at most %d", l.most, maxClients)
	}
}

// A client elsewhere, such as a pod, takes no more than its share of the places, and gets nothing
// without the token, which may come and change while the page is served.
func TestStrangers(t *testing.T) {
	inner, err := Listen("127.0.0.1:0")
	must(t, err)
	l := &counted{Listener: inner, from: make(chan string, 100)}
	path := filepath.Join(t.TempDir(), "token")
	go Serve(t.Context(), l, example(), path, slog.New(slog.DiscardHandler))
	dial := func(from string) net.Conn {
		t.Helper()
		l.from <- from
		c, err := net.Dial("tcp", inner.Addr().String())
		must(t, err)
		t.Cleanup(func() { c.Close() })
		return c
	}
	ask := func(c net.Conn, path, token string) (status int) {
		t.Helper()
		_, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n", path, token)
		must(t, err)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return 0 // it is closed
		}
		must(t, resp.Body.Close())
		return resp.StatusCode
	}
	for i := range 2 * maxClients {
		if got := ask(dial("10.0.0.1"), "/", ""); (got == http.StatusOK) != (i < maxOfOne) {
			t.Errorf("connection %d of one client: %d", i, got)
		}
	}
	for i, x := range []struct {
		file, token string
		want        int
	}{{"", "", 401}, {"secret\n", "", 401}, {"secret\n", "secret", 200}, {"secret\n", "secreT", 401}, {"other", "secret", 401}, {"other", "other", 200}, {"\n", "", 401}} {
		if x.file != "" {
			must(t, os.WriteFile(path, []byte(x.file), 0o600))
		}
		c := dial(fmt.Sprintf("10.0.1.%d", i)) // each from another: the server may not have seen yet that an earlier one has left
		if got := ask(c, "/metrics", x.token); got != x.want {
			t.Errorf("token %q where it is %q: %d, want %d", x.token, x.file, got, x.want)
		}
		must(t, c.Close())
	}
}

// readings counts how often the counters are read, and can hang in it.
type readings struct {
	*fakeView
	n    atomic.Int32
	hang chan struct{}
}

func (v *readings) Snapshots() []feature.Snapshot {
	v.n.Add(1)
	if v.hang != nil {
		<-v.hang
	}
	return v.fakeView.Snapshots()
}

// Whoever asks in a loop, in whatever form, has the counters read four times a second.
func TestOnePageForAll(t *testing.T) {
	v := &readings{fakeView: example()}
	r := prometheus.NewRegistry()
	r.MustRegister(samples{v}, agent{v})
	now := time.Unix(1_800_000_000, 0)
	p := newPages(r, func() time.Time { return now }, slog.New(slog.DiscardHandler))
	get := func(header, value string) *httptest.ResponseRecorder {
		t.Helper()
		req := httptest.NewRequest("GET", "/metrics", nil)
		req.Header.Set(header, value)
		w := httptest.NewRecorder()
		p.ServeHTTP(w, req)
		if w.Code != http.StatusOK || w.Body.Len() == 0 {
			t.Fatalf("%d, %q", w.Code, w.Body)
		}
		return w
	}
	for range 100 {
		if got := get("Accept", "*/*").Body.String(); !strings.Contains(got, "fairlead_netcpu_weight{") {
			t.Fatalf("the page is %q", got)
		}
		if got := get("Accept-Encoding", "gzip").Header().Get("Content-Encoding"); got != "gzip" {
			t.Fatalf("the page's encoding is %q", got)
		}
		const proto = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
		if got := get("Accept", proto).Header().Get("Content-Type"); !strings.HasPrefix(got, "application/vnd.google.protobuf;") {
			t.Fatalf("the page's type is %q", got)
		}
	}
	if v.n.Load() != 1 || len(p.made) != 3 {
		t.Errorf("300 requests at one moment read the counters %d times and made %d pages, want 1 and 3", v.n.Load(), len(p.made))
	}
	for range 8 {
		now = now.Add(freshFor / 2)
		get("Accept", "*/*")
	}
	if v.n.Load() != 5 {
		t.Errorf("a second later they have been read %d times, want 5", v.n.Load())
	}
}

// A feature that hangs keeps one request; the others are answered in time.
func TestPageThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := &readings{fakeView: example(), hang: make(chan struct{})}
		r := prometheus.NewRegistry()
		r.MustRegister(samples{v})
		h := newPages(r, time.Now, slog.New(slog.DiscardHandler))
		for range 3 {
			w := httptest.NewRecorder()
			if h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil)); w.Code != http.StatusServiceUnavailable {
				t.Errorf("the answer is %d", w.Code)
			}
		}
		if v.n.Load() != 1 {
			t.Errorf("%d requests hang", v.n.Load())
		}
		close(v.hang)
	})
}
