package metrics

import (
	"bytes"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/netutil"
)

// DefaultAddr is the default address of the page.
const DefaultAddr = "127.0.0.1:9643"

// CheckAddr returns an error if addr can never be the page's address. It refuses ":9643",
// which would silently mean all addresses of the host: the page has no access control, and
// names every container. 0.0.0.0:9643 and [::]:9643 say so explicitly.
func CheckAddr(addr string) error {
	if strings.HasPrefix(addr, ":") {
		return fmt.Errorf("metrics address %q would be open on every address of this host: write 127.0.0.1%s, or 0.0.0.0%s if that is what you want", addr, addr, addr)
	}
	_, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return fmt.Errorf("metrics address %q: %w", addr, err)
	}
	return nil
}

// Listen opens the page's address. Errors: those of CheckAddr, and that of net.Listen if
// the address is in use.
func Listen(addr string) (net.Listener, error) {
	if err := CheckAddr(addr); err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return l, nil
}

// Loopback reports whether only this host can reach l.
func Loopback(l net.Listener) bool {
	a, ok := l.Addr().(*net.TCPAddr)
	return ok && a.IP.IsLoopback()
}

// What anybody who can connect may take of the agent.
const (
	maxClients = 16                     // connections at a time; further ones wait in the kernel's queue
	maxOfOne   = 2                      // of them from one address elsewhere
	answerTime = 10 * time.Second       // for one page
	freshFor   = 250 * time.Millisecond // one page is for all who ask within this time
)

// Serve serves the page at /metrics until ctx ends, and closes l. It serves maxClients
// connections at a time, and reads the counters once in freshFor at most, however many
// clients ask. Clients need the token in the file at path; "": they need none.
func Serve(ctx context.Context, l net.Listener, v View, path string, log *slog.Logger) error {
	mux := http.NewServeMux()
	pages := newPages(New(v), time.Now, log)
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		if why := refuse(path, r.Header.Get("Authorization")); why != "" {
			w.Header().Set("Connection", "close") // the place is for others
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, why, http.StatusUnauthorized)
			return
		}
		pages.ServeHTTP(w, r)
	})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "fairlead: see /metrics")
	})
	s := http.Server{
		Handler: mux, ReadTimeout: 5 * time.Second, WriteTimeout: answerTime + 5*time.Second, IdleTimeout: 5 * time.Second,
		MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	if err := ServeUntil(ctx, &s, netutil.LimitListener(&fair{Listener: l, of: make(map[netip.Addr]int)}, maxClients)); err != nil {
		return fmt.Errorf("serve metrics at %s: %w", l.Addr(), err)
	}
	return nil
}

// refuse returns why a client may not have the page; "": it may. The file is read each time, so that
// another token counts at once.
func refuse(path, authorization string) string {
	if path == "" {
		return ""
	}
	data, err := os.ReadFile(path)
	token := bytes.TrimSpace(data)
	switch {
	case err != nil || len(token) == 0:
		return "the agent has no token for this page yet: metrics-token-file names its file"
	case subtle.ConstantTimeCompare([]byte(authorization), append([]byte("Bearer "), token...)) != 1:
		return "this page needs a token: that in the agent's metrics-token-file"
	}
	return ""
}

// fair is a listener that closes connections beyond maxOfOne from an address of another host or pod.
type fair struct {
	net.Listener
	mu sync.Mutex
	of map[netip.Addr]int
}

type fairConn struct {
	net.Conn
	left func()
}

func (c fairConn) Close() error {
	c.left()
	return c.Conn.Close()
}

func (l *fair) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		at, ok := c.RemoteAddr().(*net.TCPAddr)
		if !ok || at.IP.IsLoopback() {
			return c, nil
		}
		from := at.AddrPort().Addr()
		if l.add(from, 1) <= maxOfOne {
			return fairConn{c, sync.OnceFunc(func() { l.add(from, -1) })}, nil
		}
		l.add(from, -1)
		c.Close()
		time.Sleep(time.Millisecond) // so that one who connects in a loop costs little
	}
}

func (l *fair) add(from netip.Addr, n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of[from] += n
	if n = l.of[from]; n == 0 {
		delete(l.of, from)
	}
	return n
}

// ServeUntil serves at l until ctx ends. Then it lets requests under way finish for a
// second, and closes l.
func ServeUntil(ctx context.Context, s *http.Server, l net.Listener) error {
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if s.Shutdown(end) != nil {
			s.Close()
		}
	})
	err := s.Serve(l)
	if !stop() {
		<-done
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
