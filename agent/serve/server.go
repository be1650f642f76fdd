package serve

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/metrics"
)

const (
	maxBody   = 64 << 10 // of a request
	maxPeople = 256      // connections to the agent's socket at a time
	maxSelves = 256      // connections to the containers' socket at a time
)

// Serve answers on the agent's socket until ctx ends. Then it lets running requests finish for a
// moment, and closes l.
func Serve(ctx context.Context, l net.Listener, b Backend, log *slog.Logger) error {
	return serve(ctx, visitors{Listener: l, places: make(chan struct{}, maxPeople)}, newHandler(ctx, b, false, log), time.Minute)
}

// ServeView is Serve on the read-only socket: it refuses all changes, even to root.
func ServeView(ctx context.Context, l net.Listener, b Backend, log *slog.Logger) error {
	return serve(ctx, visitors{Listener: l, places: make(chan struct{}, maxPeople), looks: true}, newHandler(ctx, b, false, log), time.Minute)
}

// ServeSelf answers on the socket of the containers. A container must not block it for long,
// whatever it sends or does not send, and must not occupy it alone: see guests.
func ServeSelf(ctx context.Context, l net.Listener, b Backend, log *slog.Logger) error {
	v := visitors{Listener: l, places: make(chan struct{}, maxSelves), guests: newGuests(b.Caller, log)}
	return serve(ctx, v, newHandler(ctx, b, true, log), 2*time.Second)
}

func serve(ctx context.Context, l visitors, h http.Handler, idle time.Duration) error {
	s := http.Server{
		Handler:           h,
		ReadHeaderTimeout: min(5*time.Second, idle),
		ReadTimeout:       min(10*time.Second, idle),
		WriteTimeout:      min(time.Minute, 5*idle),
		IdleTimeout:       idle,
		MaxHeaderBytes:    16 << 10,
		ConnContext:       withPeer,
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug), // errors of clients are not worth a log line
	}
	if err := metrics.ServeUntil(ctx, &s, l); err != nil {
		return fmt.Errorf("serve at %s: %w", l.Addr(), errors.Join(err, l.Close()))
	}
	return nil
}

// newHandler serves the routes of one socket, with self that for containers. Streams end with ctx.
func newHandler(ctx context.Context, b Backend, self bool, log *slog.Logger) http.Handler {
	mux := http.NewServeMux()
	rs := &readers{end: ctx}
	for _, r := range routes() {
		if r.self == self {
			mux.Handle(r.method+" "+r.path, endpoint(b, r, rs, log))
		}
	}
	if !self {
		mux.HandleFunc("GET /v1/openapi.json", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Write(OpenAPI())
		})
	}
	// Requests that match no route: answers of the mux itself are not JSON.
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		e := &api.Error{Status: http.StatusNotFound, Code: "not_found", Text: fmt.Sprintf("there is no %q here", r.URL.Path)}
		var methods []string
		for _, other := range routes() {
			if other.path == r.URL.Path && other.self == self {
				methods = append(methods, other.method)
			}
		}
		if takes := strings.Join(methods, ", "); takes != "" {
			e = &api.Error{Status: http.StatusMethodNotAllowed, Code: "bad_request", Text: fmt.Sprintf("%s takes %s", r.URL.Path, takes)}
			w.Header().Set("Allow", takes)
		}
		answer(w, e.Status, api.Failure{Error: *e})
	})
	return mux
}

// done returns the status of an answer without an error.
func (r route) done() int { return cmp.Or(r.status, http.StatusOK) }

func endpoint(b Backend, r route, rs *readers, log *slog.Logger) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		req.Body = http.MaxBytesReader(w, req.Body, maxBody)
		out, err := any(nil), allowed(r, req)
		if err == nil && r.stream != nil {
			err = rs.serve(w, req, log, func(ctx context.Context, after uint64) ([]streamed, error) {
				return contained(b, r, func() ([]streamed, error) { return r.stream(b, req.WithContext(ctx), after) })
			})
			if err == nil {
				return
			}
		} else if err == nil {
			out, err = contained(b, r, func() (any, error) { return r.call(b, req) })
		}
		if err == nil {
			answer(w, r.done(), out)
			return
		}
		var e *api.Error
		if !errors.As(err, &e) {
			log.Error("request", "method", r.method, "path", r.path, "err", err)
			e = &api.Error{Status: http.StatusInternalServerError, Code: "internal", Text: api.Text(err)}
		}
		answer(w, e.Status, api.Failure{Error: *e})
	})
}

// contained calls fn. A panic becomes the request's error.
func contained[T any](b Backend, r route, fn func() (T, error)) (out T, err error) {
	defer func() {
		if value := recover(); value != nil {
			err = b.Panicked(r.method+" "+r.path, value)
		}
	}()
	return fn()
}

// allowed refuses writes by peers that may only read. A route of the self socket changes only the
// state of the caller.
func allowed(r route, req *http.Request) error {
	if r.method == http.MethodGet || r.self {
		return nil
	}
	p, err := peer(req.Context())
	if err != nil {
		return err
	}
	if p.looks {
		return &api.Error{Status: http.StatusForbidden, Code: "forbidden",
			Text: fmt.Sprintf("this socket is for looking: only root and the group %s may change anything, by the agent's own", api.Group)}
	}
	if !p.mayWrite() {
		return &api.Error{Status: http.StatusForbidden, Code: "forbidden",
			Text: fmt.Sprintf("user id %d may not change anything: only root and the group %s may", p.UID, api.Group)}
	}
	return nil
}

// taking returns the call of a route whose request has a T as its body.
func taking[T any](call func(Backend, *http.Request, T) (any, error)) func(Backend, *http.Request) (any, error) {
	return func(b Backend, r *http.Request) (any, error) {
		var in T
		if err := read(r, &in); err != nil {
			return nil, err
		}
		return call(b, r, in)
	}
}

// read decodes the body of a request; an empty body leaves in as it is.
func read(r *http.Request, in any) error {
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	err := dec.Decode(in)
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err == nil && dec.More() {
		err = errors.New("more than one value")
	}
	if big := (*http.MaxBytesError)(nil); errors.As(err, &big) {
		return &api.Error{Status: http.StatusRequestEntityTooLarge, Code: "bad_request",
			Text: fmt.Sprintf("request body is longer than %d bytes", big.Limit)}
	}
	if err != nil {
		return &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: "read request body: " + api.Text(err)}
	}
	return nil
}

func answer(w http.ResponseWriter, status int, out any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	data, err := json.Marshal(out)
	if err != nil { // a NaN among the samples, for example
		status = http.StatusInternalServerError
		data, _ = json.Marshal(api.Failure{Error: api.Error{Status: status, Code: "internal", Text: "encode answer: " + err.Error()}})
	}
	w.WriteHeader(status)
	w.Write(append(data, '\n'))
}

// GroupID returns the number of a group, by its name or number; false if the host lacks it.
func GroupID(name string) (int, bool) {
	if g, err := user.LookupGroup(name); err == nil {
		name = g.Gid
	}
	id, err := strconv.Atoi(name)
	return id, err == nil
}

// Listen makes the agent's socket: mode 0660, owned by Group if that exists. It replaces a socket
// that a dead agent left. It returns an error if an agent answers on the socket, or if the file is
// not a socket. Close removes the socket.
func Listen(path string) (net.Listener, error) {
	gid, ok := GroupID(api.Group)
	if !ok {
		gid = -1
	}
	return listen(path, 0o660, gid)
}

// ListenView makes the read-only socket: mode 0660, owned by the group gid.
func ListenView(path string, gid int) (net.Listener, error) { return listen(path, 0o660, gid) }

// ListenSelf makes the socket for containers. Any process may connect, but sees only its own
// container.
func ListenSelf(path string) (net.Listener, error) { return listen(path, 0o666, -1) }

func listen(path string, mode fs.FileMode, gid int) (net.Listener, error) {
	if err := vacant(path); err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	// The socket gets its mode under another name, so that no client connects before.
	tmp := path + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	s := &socket{UnixListener: l, path: path, name: tmp}
	if err := s.show(mode, gid); err != nil {
		return nil, errors.Join(fmt.Errorf("listen at %s: %w", path, err), s.Close())
	}
	return s, nil
}

// vacant returns an error unless path is free.
func vacant(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("a file that is not a socket is there")
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		c.Close()
		return errors.New("another agent answers there")
	}
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("see whether another agent answers there: %w", err)
}

// socket is a unix socket that removes its file when it is closed, unless another process has
// replaced the file.
type socket struct {
	*net.UnixListener
	path string
	name string // its current path
	file fs.FileInfo
	once sync.Once
}

func (s *socket) show(mode fs.FileMode, gid int) error {
	if err := os.Chmod(s.name, mode); err != nil {
		return err
	}
	if gid >= 0 && os.Geteuid() == 0 {
		if err := os.Chown(s.name, -1, gid); err != nil {
			return err
		}
	}
	var err error
	if s.file, err = os.Lstat(s.name); err != nil {
		return err
	}
	if err := os.Rename(s.name, s.path); err != nil {
		return err
	}
	s.name = s.path
	return nil
}

// Close stops listening and removes the name.
func (s *socket) Close() error {
	s.once.Do(func() {
		if now, err := os.Lstat(s.name); err == nil && (s.file == nil || os.SameFile(now, s.file)) {
			os.Remove(s.name)
		}
	})
	return s.UnixListener.Close()
}

// The bounds of server-sent events (WHATWG HTML, section 9.2). The server keeps no state for a
// reader: it sends the events that the Backend still has, and the number that the reader has missed.
const (
	maxReaders  = 32               // of one socket at a time
	readerPause = 2 * time.Second  // a reader that does not accept an event within this time is dropped
	streamBeat  = 15 * time.Second // after this time without an event, a reader is sent a comment
)

// streamed is one event of a stream. IDs increase by any amount from one event to the next.
type streamed struct {
	ID   uint64
	Name string // of the event; "" is "message"
	Data any
}

// readers are the clients that read streams of one socket.
type readers struct {
	end context.Context // of the server

	mu            sync.Mutex
	open, dropped int
}

func (rs *readers) enter() (api.StreamState, error) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if rs.open == maxReaders {
		return api.StreamState{}, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: fmt.Sprintf("%d already follow events: there is place for no more", maxReaders)}
	}
	rs.open++
	return api.StreamState{Readers: rs.open, Dropped: rs.dropped}, nil
}

func (rs *readers) leave(slow bool) (dropped int) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.open--
	if slow {
		rs.dropped++
	}
	return rs.dropped
}

// serve sends the events that next returns after an id, until the client or the server ends. next
// waits until there is one, or its context ends.
func (rs *readers) serve(w http.ResponseWriter, r *http.Request, log *slog.Logger, next func(ctx context.Context, after uint64) ([]streamed, error)) error {
	after, err := lastEvent(r)
	if err != nil {
		return err
	}
	state, err := rs.enter()
	if err != nil {
		return err
	}
	slow := false
	defer func() {
		if n := rs.leave(slow); slow {
			log.Warn("a reader of events was dropped, as it reads too slowly", "dropped", n)
		}
	}()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(rs.end, cancel)()
	out := http.NewResponseController(w)
	send := func(text string) bool {
		out.SetWriteDeadline(time.Now().Add(readerPause))
		_, err := io.WriteString(w, text)
		if err == nil {
			err = out.Flush()
		}
		slow = slow || errors.Is(err, os.ErrDeadlineExceeded)
		return err == nil
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	for ok := send(streamed{after, "state", state}.text()); ok && ctx.Err() == nil; {
		beat, stop := context.WithTimeout(ctx, streamBeat)
		events, err := next(beat, after)
		stop()
		if err != nil && ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) {
			send(streamed{after, "error", api.Failure{Error: api.Error{Code: "internal", Text: err.Error()}}}.text())
			return nil // the status has been sent already
		}
		text := ": nothing new\n\n"
		for i, e := range events {
			if after = e.ID; i == 0 {
				text = ""
			}
			text += e.text()
		}
		ok = ctx.Err() == nil && send(text)
	}
	return nil
}

// lastEvent returns the id of the last event that a reader has, from the header Last-Event-ID of
// the standard.
func lastEvent(r *http.Request) (uint64, error) {
	text := r.Header.Get("Last-Event-ID")
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: fmt.Sprintf("Last-Event-ID %q is no number", text)}
	}
	return n, nil
}

func (e streamed) text() string {
	data, err := json.Marshal(e.Data)
	if err != nil {
		data, _ = json.Marshal(api.Failure{Error: api.Error{Code: "internal", Text: err.Error()}})
	}
	name := ""
	if e.Name != "" {
		name = "event: " + e.Name + "\n"
	}
	return fmt.Sprintf("%sid: %d\ndata: %s\n\n", name, e.ID, data)
}
