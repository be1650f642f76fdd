package probe

import (
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// listen opens a socket and hands each connection to serve.
func listen(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	must(t, err)
	testkit.Accept(t, l, serve)
	return path
}

// engine answers pings as dockerd does.
func engine(t *testing.T, status int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	must(t, err)
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Server", "Docker/20.10")
		if r.URL.Path != "/_ping" {
			status = http.StatusNotFound
		}
		w.WriteHeader(status)
	})}
	go s.Serve(l)
	t.Cleanup(func() { s.Close() })
	return path
}

func TestAnswering(t *testing.T) {
	stale := filepath.Join(t.TempDir(), "stale")
	l, err := net.Listen("unix", stale)
	must(t, err)
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()

	hear := func(c net.Conn) { c.Read(make([]byte, 4096)) }
	greet := func(c net.Conn) {
		hear(c)
		io.WriteString(c, "\x00\x00\x00\x04\x00\x00\x00\x00\x00")
	}
	mute := func(c net.Conn) { io.Copy(io.Discard, c) }
	babble := func(c net.Conn) {
		hear(c)
		io.WriteString(c, strings.Repeat("\xff babble \r\n", 1000))
	}
	for _, c := range []struct {
		name    string
		address string
		ask     func(context.Context, endpoint) (string, error)
		level   Level
		says    string
	}{
		{"engine", engine(t, 200), askEngine, Full, "Docker/20.10"},
		{"engine by URL", "unix://" + engine(t, 200), askEngine, Full, "Docker/20.10"},
		{"engine that fails", engine(t, 500), askEngine, Degraded, "500"},
		{"mute engine", listen(t, mute), askEngine, Degraded, "does not answer"},
		{"babbling engine", listen(t, babble), askEngine, Degraded, "does not answer"},
		{"engine that hangs up", listen(t, hear), askEngine, Degraded, "does not answer"},
		{"stale socket", stale, askEngine, Degraded, "nobody listens"},
		{"no socket", stale + "x", askEngine, Unavailable, "there is no"},
		{"containerd", listen(t, greet), askHTTP2, Full, ""},
		{"mute containerd", listen(t, mute), askHTTP2, Degraded, "does not answer"},
		{"babbling containerd", listen(t, babble), askHTTP2, Degraded, "does not speak HTTP/2"},
		{"no containerd", stale + "x", askHTTP2, Unavailable, "there is no"},
		{"ssh", "ssh://host", askEngine, Unavailable, "neither"},
	} {
		t.Run(c.name, func(t *testing.T) {
			patience := time.Minute
			if strings.HasPrefix(c.name, "mute") {
				patience = 100 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			a := answering(ctx, c.address, c.ask)
			if a.Level != c.level || !strings.Contains(a.Why+a.detail, c.says) {
				t.Errorf("%s, %q, %q", a.Level, a.Why, a.detail)
			}
		})
	}
}
