package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

const childEnv = "FAIRLEAD_TEST_CHILD"

func TestMain(m *testing.M) {
	if socket := os.Getenv(childEnv); socket != "" {
		_, read := api.Dial(socket).Version(context.Background())
		_, write := api.Dial(socket).Reload(context.Background())
		_, set := api.Dial(socket).Set(context.Background(), "x", api.SetRequest{})
		_, kill := api.Dial(socket).KillOverlay(context.Background(), "x")
		fmt.Printf("read: %v\nwrite: %v\nset: %v\nkill: %v\n", read, write, set, kill)
		return
	}
	testkit.Main(m)
}

// backend answers with fixed values.
type backend struct {
	err      error
	samples  api.Samples
	restored string
	set      api.SetRequest
	peer     Peer
	slow     chan struct{}
	asked    atomic.Uint64       // counts the calls of Caller, in the order of connections
	callers  func(uint64) api.ID // nil: always the same
}

func (b *backend) Containers(ctx context.Context) ([]api.Container, error) {
	if b.slow != nil {
		select {
		case <-b.slow:
		case <-ctx.Done():
		}
	}
	return []api.Container{{ID: math.MaxUint64, Name: "a\x1b\u202e", Labels: map[string]string{"k": "v"}}}, b.err
}

func (b *backend) Explain(_ context.Context, ref string) (api.Explanation, error) {
	return api.Explanation{Container: api.Container{Name: ref}, Changes: []api.Change{{Container: 7, State: api.ChangeGone}}}, b.err
}

func (b *backend) Plan(_ context.Context, ref string) ([]api.Planned, error) {
	return []api.Planned{{Object: ref}}, b.err
}

func (b *backend) Doctor(context.Context) (api.Report, error) {
	return api.Report{{Capability: "x", Area: "y", Verdict: api.Verdict{Level: api.LevelDegraded, Why: "z"}}}, b.err
}

func (b *backend) Status(context.Context) (api.Status, error) { return api.Status{Rounds: 3}, b.err }

func (b *backend) Samples(context.Context) (api.Samples, error) { return b.samples, b.err }

func (b *backend) Report(_ context.Context, ask api.Ask) (any, error) {
	if ask.Feature == "netcpu" {
		return api.NetCPU{System: api.NetCPUAccount{Name: ask.Container}}, b.err
	}
	return api.Traffic{Taken: time.Unix(0, int64(ask.Over)), Classes: []api.TrafficClass{{Name: ask.Container}}}, b.err
}

func (b *backend) Frame(context.Context) (api.Frame, error) {
	return api.Frame{Containers: []api.Container{{ID: 4}}, Reports: api.Reports{NetCPU: &api.NetCPU{Lost: 6}}}, b.err
}

func (b *backend) Overview(context.Context) (api.Overview, error) {
	return api.Overview{Rows: []api.OverviewRow{{Container: 4, Slowed: 0.5}}}, b.err
}

func (b *backend) Command(context.Context, api.Ask) (any, error) {
	return nil, errors.New("no feature takes commands")
}

func (b *backend) Version(context.Context) (api.Version, error) {
	return api.Version{Version: "v"}, b.err
}

func (b *backend) Reload(context.Context) (api.PolicyStatus, error) {
	return api.PolicyStatus{OK: true}, b.err
}

func (b *backend) Restore(_ context.Context, ref string) (api.Restored, error) {
	b.restored = ref
	return api.Restored{Outcomes: []api.Outcome{{Container: 5, Result: "gone"}}}, b.err
}

func (b *backend) Set(_ context.Context, ref string, by Peer, in api.SetRequest) (api.Container, error) {
	b.peer, b.set = by, in
	return api.Container{Name: ref}, b.err
}

func (b *backend) Self(_ context.Context, p Peer) (api.Self, error) {
	b.peer = p
	if !p.Same() {
		return api.Self{}, errors.New("the peer has gone")
	}
	return api.Self{ID: 9}, b.err
}

func (b *backend) Caller(Peer) api.ID {
	if n := b.asked.Add(1) - 1; b.callers != nil {
		return b.callers(n)
	}
	return 9
}

func (b *backend) Panicked(request string, value any) error {
	return fmt.Errorf("%s: panic: %v", request, value)
}

// served serves b until the test ends, and returns the socket.
func served(t *testing.T, b Backend, mode os.FileMode, serve func(context.Context, net.Listener, Backend, *slog.Logger) error) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		testkit.Must(t, os.Chmod(d, 0o755))
	}
	path := filepath.Join(dir, "sock")
	l, err := listen(path, mode, -1)
	testkit.Must(t, err)
	stop := testkit.Background(t, func(ctx context.Context) error { return serve(ctx, l, b, slog.New(slog.DiscardHandler)) })
	t.Cleanup(func() {
		testkit.Check(t, stop())
		testkit.Is(t, "the socket is still there", testkit.Err(os.Lstat(path)), os.ErrNotExist)
	})
	return path
}

func TestRoundTrip(t *testing.T) {
	b := &backend{}
	c := api.Dial(served(t, b, 0o660, Serve))
	defer c.Close()
	ctx := t.Context()

	list, err := c.Containers(ctx)
	if err != nil || len(list) != 1 || list[0].ID != math.MaxUint64 || list[0].Name != "a\x1b\u202e" {
		t.Errorf("containers: %+v, %v", list, err)
	}
	for _, ref := range []string{"plain", "a/b c?d#e", "...", "ü%2f", "\x1b[31m"} {
		x, err := c.Explain(ctx, ref)
		if err != nil || x.Container.Name != ref || len(x.Changes) != 1 || x.Changes[0].Container != 7 {
			t.Errorf("explain %q: %+v, %v", ref, x, err)
		}
	}
	if r, err := c.Doctor(ctx); err != nil || len(r) != 1 || r[0].Why != "z" {
		t.Errorf("doctor: %+v, %v", r, err)
	}
	if s, err := c.Status(ctx); err != nil || s.Rounds != 3 {
		t.Errorf("status: %+v, %v", s, err)
	}
	if p, err := c.Reload(ctx); err != nil || !p.OK {
		t.Errorf("reload: %+v, %v", p, err)
	}
	for _, ref := range []string{"", "web"} {
		if r, err := c.Restore(ctx, ref); err != nil || b.restored != ref || len(r.Outcomes) != 1 || r.Outcomes[0].Container != 5 {
			t.Errorf("restore %q: %+v, %v", ref, r, err)
		}
	}
	in := api.SetRequest{Set: map[string]string{"net.rate": "50mbit"}, Unset: []string{"net.weight"}}
	if got, err := c.Set(ctx, "a/b", in); err != nil || got.Name != "a/b" || !reflect.DeepEqual(b.set, in) || b.peer.PID != os.Getpid() {
		t.Errorf("set: %+v, %v; the backend has %+v of %+v", got, err, b.set, b.peer)
	}
	for _, ref := range []string{"", "web", "a/b c?d#e", "..."} {
		if n, err := c.NetCPU(ctx, ref); err != nil || n.System.Name != ref {
			t.Errorf("netcpu %q: %+v, %v", ref, n, err)
		}
		for _, over := range []time.Duration{0, api.MaxOver} {
			if n, err := c.Traffic(ctx, ref, over); err != nil || len(n.Classes) != 1 || n.Classes[0].Name != ref || n.Taken.UnixNano() != int64(over) {
				t.Errorf("traffic %q over %v: %+v, %v", ref, over, n, err)
			}
		}
	}
	if _, err := c.Self(ctx); !isCode(err, "not_found") {
		t.Errorf("self on the agent's socket: %v", err)
	}
}

// torn is a backend that panics.
type torn struct{ backend }

func (*torn) Status(context.Context) (api.Status, error) { panic("torn") }

// A panic is one request's error, in the form of all others; the connection goes on.
func TestPanic(t *testing.T) {
	c := api.Dial(served(t, &torn{}, 0o660, Serve))
	defer c.Close()
	for range 5 {
		if _, err := c.Status(t.Context()); !isCode(err, "internal") || err.Error() != "GET /v1/status: panic: torn" {
			t.Errorf("a panic arrives as %v", err)
		}
		testkit.Is(t, "afterwards", testkit.Err(c.Version(t.Context())), nil)
	}
}

func isCode(err error, code string) bool {
	var e *api.Error
	return errors.As(err, &e) && e.Code == code
}

func TestErrors(t *testing.T) {
	b := &backend{err: &api.Error{Status: http.StatusConflict, Code: "ambiguous", Text: "which?"}}
	c := api.Dial(served(t, b, 0o660, Serve))
	defer c.Close()
	_, err := c.Explain(t.Context(), "x")
	var e *api.Error
	if !errors.As(err, &e) || *e != (api.Error{Status: http.StatusConflict, Code: "ambiguous", Text: "which?"}) || err.Error() != "which?" {
		t.Errorf("an error of the backend arrives as %#v", err)
	}
	b.err = errors.New("disk on fire")
	if _, err := c.Status(t.Context()); !isCode(err, "internal") || err.Error() != "disk on fire" {
		t.Errorf("any other error arrives as %v", err)
	}
	b.err = nil
	b.samples = api.Samples{Features: []api.FeatureSamples{{Samples: []api.Sample{{Value: math.NaN()}}}}}
	if _, err := c.Samples(t.Context()); !isCode(err, "internal") {
		t.Errorf("what JSON cannot say arrives as %v", err)
	}
}

// raw sends one HTTP request by hand and returns the status line and the body.
func raw(t *testing.T, socket, request string) string {
	t.Helper()
	c, err := net.Dial("unix", socket)
	testkit.Must(t, err)
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	testkit.Must(t, testkit.Err(c.Write([]byte(request))))
	buf := make([]byte, 4096)
	n, _ := c.Read(buf)
	return string(buf[:n])
}

func TestBadRequests(t *testing.T) {
	b := &backend{}
	socket := served(t, b, 0o660, Serve)
	post := func(body string) string {
		return fmt.Sprintf("POST /v1/restore HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	}
	get := func(method, path string) string { return method + " " + path + " HTTP/1.1\r\nHost: x\r\n\r\n" }
	for _, x := range []struct{ request, status, code string }{
		{get("GET", "/v1/nonsense"), "404", "not_found"},
		{get("GET", "/"), "404", "not_found"},
		{get("GET", "/v1/self"), "404", "not_found"},
		{get("POST", "/v1/status"), "405", "bad_request"},
		{get("DELETE", "/v1/restore"), "405", "bad_request"},
		{get("GET", "/v1/traffic?over=30.1s"), "400", "bad_request"},
		{get("GET", "/v1/traffic?over=-1s"), "400", "bad_request"},
		{get("GET", "/v1/containers/web/traffic?over=long"), "400", "bad_request"},
		{post(`{"container":1}`), "400", "bad_request"},
		{post(`{"conteiner":"web"}`), "400", "bad_request"},
		{post(`{"container":"web"}{}`), "400", "bad_request"},
		{post(`{"container":"` + strings.Repeat("x", maxBody) + `"}`), "413", "bad_request"},
	} {
		got := raw(t, socket, x.request)
		if !strings.HasPrefix(got, "HTTP/1.1 "+x.status) || !strings.Contains(got, `"code":"`+x.code+`"`) || !strings.Contains(got, "Content-Type: application/json") {
			t.Errorf("%.60q: %s", x.request, got)
		}
	}
	testkit.Same(t, "restored", "", b.restored)
}

func TestPeer(t *testing.T) {
	b := &backend{}
	c := api.Dial(served(t, b, 0o666, ServeSelf))
	defer c.Close()
	s, err := c.Self(t.Context())
	if err != nil || s.ID != 9 {
		t.Fatalf("self: %+v, %v", s, err)
	}
	if b.peer.PID != os.Getpid() || b.peer.UID != os.Getuid() || b.peer.GID != os.Getgid() {
		t.Errorf("peer %+v", b.peer)
	}
	for does, err := range map[string]error{
		"sees the others":                           testkit.Err(c.Containers(t.Context())),
		"sees whose packets took whose time":        testkit.Err(c.NetCPU(t.Context(), "")),
		"sees whose packets took its time":          testkit.Err(c.NetCPU(t.Context(), "9")),
		"sees the bandwidth of others":              testkit.Err(c.Traffic(t.Context(), "", 0)),
		"sees its bandwidth as the host's users do": testkit.Err(c.Traffic(t.Context(), "9", 0)),
		"may set its policy":                        testkit.Err(c.Set(t.Context(), "9", api.SetRequest{Set: map[string]string{"netcpu": "isolate"}})),
		"may restore":                               testkit.Err(c.Restore(t.Context(), "")),
	} {
		if !isCode(err, "not_found") {
			t.Errorf("a container %s: %v", does, err)
		}
	}
}

func TestMayWrite(t *testing.T) {
	for _, x := range []struct {
		peer Peer
		want bool
	}{
		{Peer{UID: 0, GID: 5}, true},
		{Peer{UID: 1000, GID: 0}, false},
		{Peer{UID: 1000, GID: 1000, Groups: []uint32{0, 4}}, false},
	} {
		testkit.Same(t, fmt.Sprintf("%+v may write", x.peer), x.want, x.peer.mayWrite())
	}
	gid, ok := GroupID(api.Group)
	if ok && !(Peer{UID: 1000, GID: 1000, Groups: []uint32{4, uint32(gid)}}).mayWrite() {
		t.Error("a member of the group may not write")
	}
}

// A user who is neither root nor in the group may read where the socket lets the user in, and write
// nowhere.
func TestStrangerMayNotWrite(t *testing.T) {
	testkit.NeedRoot(t)
	stranger := func(socket string) string {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), childEnv+"="+socket)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534, Groups: []uint32{65533}}}
		out, err := cmd.CombinedOutput()
		testkit.Is(t, "stranger", err, nil)
		return string(out)
	}
	const refused = "user id 65534 may not change anything: only root and the group fairlead may\n"
	want := "read: <nil>\nwrite: " + refused + "set: " + refused + "kill: " + refused
	testkit.Same(t, "on an open socket", want, stranger(served(t, &backend{}, 0o666, Serve)))
	view := served(t, &backend{}, 0o666, ServeView)
	const looks = "this socket is for looking: only root and the group fairlead may change anything, by the agent's own\n"
	want = "read: <nil>\nwrite: " + looks + "set: " + looks + "kill: " + looks
	testkit.Same(t, "on the socket for looking", want, stranger(view))
	if _, err := api.Dial(view).Reload(t.Context()); err == nil || err.Error()+"\n" != looks {
		t.Errorf("root on the socket for looking: %v", err)
	}
	closed := served(t, &backend{}, 0o660, Serve)
	if out := stranger(closed); !strings.HasPrefix(out, "read: connect to the agent at "+closed+": permission denied") {
		t.Errorf("on the agent's socket: %s", out)
	}
	// A member of the group for looking finds its way there.
	l, err := ListenView(api.ViewSocket(closed), 65533)
	testkit.Must(t, err)
	go ServeView(t.Context(), l, &backend{}, slog.New(slog.DiscardHandler))
	testkit.Same(t, "in the group for looking", want, stranger(closed))
}

func TestListen(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "deeper", "sock")
	l, err := Listen(path)
	testkit.Must(t, err)
	info, err := os.Lstat(path)
	if err != nil || info.Mode() != os.ModeSocket|0o660 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	// An agent answers on this socket.
	testkit.Fails(t, "a second agent", testkit.Err(Listen(path)), "another agent answers")
	testkit.Check(t, l.Close())
	testkit.Is(t, "after Close", testkit.Err(os.Lstat(path)), os.ErrNotExist)

	// A dead agent left this socket.
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	testkit.Must(t, err)
	dead.SetUnlinkOnClose(false)
	dead.Close()
	l, err = Listen(path)
	if err != nil {
		t.Fatalf("in place of a dead agent: %v", err)
	}
	// Another file has taken the name: Close must leave it.
	os.Remove(path)
	testkit.Must(t, os.WriteFile(path, nil, 0o600))
	l.Close()
	testkit.Is(t, "Close removed what is not its own", testkit.Err(os.Lstat(path)), nil)
	testkit.Fails(t, "in place of a file", testkit.Err(Listen(path)), "not a socket")
	if _, err := Listen(filepath.Join(dir, strings.Repeat("x", 200))); err == nil {
		t.Error("a name that is too long for a socket is taken")
	}
}
