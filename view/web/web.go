// Package web is the page of `fairlead web`: the containers with what slows them, who slows whom,
// and how it was before, in a browser. It shows what package view offers, as package view/tui does
// in a terminal, and changes nothing. Everything works without script; script.js refreshes the page
// and shows the values below the pointer. Pages need no network: all that they load is embedded.
//
// It finds no agent and opens no recording; the verb web of cmd/fairlead does, and calls it.
package web

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
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
