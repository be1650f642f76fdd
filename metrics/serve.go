package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
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
	answerTime = 10 * time.Second       // for one page
	freshFor   = 250 * time.Millisecond // one page is for all who ask within this time
)

// Serve serves the page at /metrics until ctx ends, and closes l. It serves maxClients
// connections at a time, and reads the counters once in freshFor at most, however many
// clients ask.
func Serve(ctx context.Context, l net.Listener, v View, log *slog.Logger) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", newPages(New(v), time.Now, log))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "fairlead: see /metrics")
	})
	s := http.Server{
		Handler: mux, ReadTimeout: 5 * time.Second, WriteTimeout: answerTime + 5*time.Second, IdleTimeout: 5 * time.Second,
		MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	if err := ServeUntil(ctx, &s, netutil.LimitListener(l, maxClients)); err != nil {
		return fmt.Errorf("serve metrics at %s: %w", l.Addr(), err)
	}
	return nil
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
