// Package web is the page of `fairlead web`: the containers with what slows them, who slows whom,
// and how it was before, in a browser. It shows what package view offers, as package view/tui does
// in a terminal, and changes nothing. Everything works without script; script.js refreshes the page
// and shows the values below the pointer. Pages need no network: all that they load is embedded.
//
// It finds no agent and opens no recording; the verb web of cmd/fairlead does, and calls it.
package web

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/view"
)

// Options are what a Server shows. Source, Now and Text are required.
type Options struct {
	Source view.Source
	Title  string // of the host or the recording; hostile
	Now    func() time.Time
	// Explain asks the agent what was changed on the host for a container; nil: that is not known.
	Explain func(ctx context.Context, id api.ID) (api.Explanation, error)
	// Text writes an explanation as text, safe to print; changes: with what was changed on the
	// host.
	Text func(x api.Explanation, changes bool, now time.Time) string
}

// Server serves the pages to those who have its link. Make it with New.
type Server struct {
	o     Options
	agent view.Live // the Source, if it is an agent
	g     *guard

	mu   sync.Mutex
	live view.History // of an agent, since the server runs
	fail error        // of the last try to ask the agent
}

// keep is how much of the past a live Server has in memory.
const keep = 15 * time.Minute

// New makes a Server with a token of its own.
func New(o Options) *Server {
	agent, _ := o.Source.(view.Live)
	return &Server{o: o, agent: agent, g: newGuard(), live: view.History{Keep: keep}}
}

// Link is the address to open, for a Server that listens at addr. It contains the token.
func (s *Server) Link(addr net.Addr) string { return "http://" + addr.String() + s.g.link() }

// Serve serves pages on l, which it closes, until ctx ends. It asks the agent for a frame every
// view.Every, if the Source is an agent.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	if s.agent != nil {
		wg.Go(func() { s.follow(ctx) })
	}
	defer wg.Wait()
	srv := &http.Server{
		Handler:           s.Handler(),
		ReadHeaderTimeout: 5 * time.Second,
		WriteTimeout:      time.Minute,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	stop := context.AfterFunc(ctx, func() { srv.Close() }) // its pages are read only: nothing is lost
	defer stop()
	err := srv.Serve(netutil.LimitListener(l, maxClients))
	if cancel(); errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// maxClients is how many connections there are at a time: any local user may connect.
const maxClients = 128

// follow adds the agent's frames to the history until ctx ends.
func (s *Server) follow(ctx context.Context) {
	t := time.NewTicker(view.Every)
	defer t.Stop()
	for {
		s.ask(ctx)
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

// ask adds one frame of the agent.
func (s *Server) ask(ctx context.Context) {
	f, err := s.agent.Next(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail = err; err == nil {
		s.live.Add(f)
	}
}

// most is how many frames of a recording are read for one page. Frames are totals, so the
// difference of two that lie further apart is still exact.
const most = 300

// window returns the history of a span that ends at to; live is what is in memory. now: the span goes
// on.
func (s *Server) window(ctx context.Context, live view.History, to time.Time, span time.Duration, now bool) (*view.History, error) {
	if first, _ := live.Bounds(); s.agent != nil && !first.IsZero() && !first.After(to.Add(-span+2*view.Every)) {
		return &live, nil
	}
	var h view.History
	step := span / most
	for f, err := range s.o.Source.Frames(ctx, to.Add(-span-step-30*time.Second), to, step) {
		if err != nil && !errors.Is(err, io.EOF) {
			if h.Len() > 0 || now {
				break // what comes before it is whole
			}
			return &h, err
		}
		h.Add(f)
	}
	if now && s.agent != nil {
		live.Before(&h)
		return &live, nil
	}
	return &h, nil
}

// guard lets those in who have the link. Everybody on the host can connect to a loopback address,
// and every page that a browser shows can send requests to it.
//
// The first request has the token in its query, and gets a cookie for the later ones. The token
// counts once: the command line of what opens the link shows it to everybody. Browsers send
// a cookie to all ports of a host, so the cookie is bound to a path that others do not know.
type guard struct {
	token, cookie string // secrets
	path          string // in front of all pages; begins and ends with a slash
	spent         atomic.Bool
}

const cookieName = "fairlead"

func newGuard() *guard {
	return &guard{token: rand.Text(), cookie: rand.Text(), path: "/" + strings.ToLower(rand.Text()[:10]) + "/"}
}

func (g *guard) link() string { return g.path + "?token=" + g.token }

func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// policy allows what the server itself serves, and no script or style inside a page.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// wrap returns next behind the guard. next sees paths below g.path, with a slash in front.
func (g *guard) wrap(next http.Handler) http.Handler {
	pages := http.StripPrefix(strings.TrimSuffix(g.path, "/"), next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		first := r.Method == http.MethodGet && r.URL.Path == g.path && r.URL.Query().Has("token")
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		switch {
		case !loopback(r.Host):
			http.Error(w, "this page is served to this host only", http.StatusMisdirectedRequest)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			h.Set("Allow", "GET, HEAD")
			http.Error(w, "this page changes nothing", http.StatusMethodNotAllowed)
		case first && same(r.URL.Query().Get("token"), g.token):
			if !g.knows(r) && !g.spent.CompareAndSwap(false, true) {
				http.Error(w, "the link works once, and has been opened: run `fairlead web` again", http.StatusForbidden)
				return
			}
			http.SetCookie(w, &http.Cookie{Name: cookieName, Value: g.cookie, Path: g.path, HttpOnly: true, SameSite: http.SameSiteStrictMode})
			// Not a redirect: after one from another site's link the browser would leave the
			// cookie out. The token must not stay in the address.
			h.Set("Content-Type", "text/html; charset=utf-8")
			h.Set("Refresh", "0; url="+g.path)
			w.Write([]byte(`<!DOCTYPE html><html lang="en"><title>fairlead</title><p><a href="` + g.path + `">fairlead</a></p></html>`))
		case first, !strings.HasPrefix(r.URL.Path, g.path), !g.knows(r):
			http.Error(w, "open the link that `fairlead web` has printed", http.StatusForbidden)
		default:
			pages.ServeHTTP(w, r)
		}
	})
}

func (g *guard) knows(r *http.Request) bool {
	return slices.ContainsFunc(r.CookiesNamed(cookieName), func(c *http.Cookie) bool { return same(c.Value, g.cookie) })
}

// loopback reports whether a Host header names this host by what nobody else can make resolve to
// it: with another name the request may come from a page that has rebound its own. The port may be
// another one: that of a tunnel.
func loopback(host string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	if name == "localhost" {
		return true
	}
	ip := net.ParseIP(strings.Trim(name, "[]"))
	return ip != nil && ip.IsLoopback()
}
