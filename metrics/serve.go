package metrics

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
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

// pages is the page in the forms that clients accept. All who ask within freshFor get
// the same one: a client in a loop makes the agent read and encode nothing more.
type pages struct {
	from prometheus.Gatherer
	now  func() time.Time
	log  *slog.Logger

	turn     chan struct{} // capacity 1: guards what follows
	taken    time.Time
	families []*dto.MetricFamily
	made     map[form][]byte // of families; as many as there are forms
}

// form is how a page is encoded.
type form struct {
	format expfmt.Format
	zipped bool
}

func newPages(from prometheus.Gatherer, now func() time.Time, log *slog.Logger) *pages {
	return &pages{from: from, now: now, log: log, turn: make(chan struct{}, 1)}
}

func (p *pages) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f := form{expfmt.NegotiateAccept(r.Header, expfmt.DefaultAcceptedFormats()...), strings.Contains(r.Header.Get("Accept-Encoding"), "gzip")}
	ctx, cancel := context.WithTimeout(r.Context(), answerTime)
	defer cancel()
	var page []byte
	read := make(chan error, 1)
	go func() {
		got, err := p.page(ctx, f)
		page = got
		read <- err
	}()
	select {
	case err := <-read:
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	case <-ctx.Done():
		http.Error(w, "the counters cannot be read at present: see the log of the agent", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", string(f.format))
	w.Header().Set("Vary", "Accept, Accept-Encoding")
	if f.zipped {
		w.Header().Set("Content-Encoding", "gzip")
	}
	w.Write(page) // not a copy: as many clients as may connect can be slow to read it
}

// page returns the page of this moment. One caller at a time reads the counters; those
// who wait for it leave when ctx ends, so that a feature that hangs keeps no more than
// one goroutine.
func (p *pages) page(ctx context.Context, f form) ([]byte, error) {
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if now := p.now(); p.made == nil || now.Sub(p.taken) >= freshFor {
		families, err := p.from.Gather()
		if err != nil { // the rest of the page is right
			p.log.Error("metrics page", "err", err)
			if len(families) == 0 {
				return nil, err
			}
		}
		p.taken, p.families, p.made = now, families, make(map[form][]byte)
	}
	page, ok := p.made[f]
	if !ok {
		var err error
		if page, err = encode(p.families, f); err != nil {
			return nil, err
		}
		p.made[f] = page
	}
	return page, nil
}

func encode(families []*dto.MetricFamily, f form) ([]byte, error) {
	var out bytes.Buffer
	to := io.Writer(&out)
	zip := gzip.NewWriter(&out)
	if f.zipped {
		to = zip
	}
	enc := expfmt.NewEncoder(to, f.format)
	var errs []error
	for _, family := range families {
		errs = append(errs, enc.Encode(family))
	}
	if c, ok := enc.(expfmt.Closer); ok {
		errs = append(errs, c.Close())
	}
	if f.zipped {
		errs = append(errs, zip.Close())
	}
	return out.Bytes(), errors.Join(errs...)
}
