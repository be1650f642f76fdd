package agent

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/policy"
)

// Any local user can take the address of the metrics page. The agent works
// without, and serves it once it can.
func TestAgentWithoutMetrics(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	addr := taken.Addr().String()
	r := newRig(t, 1)
	var log safeBuffer
	ready := make(chan struct{})
	cfg := Config{StateDir: r.state, Log: slog.New(slog.NewTextHandler(&log, nil)), MetricsAddr: addr, SelfSocket: r.state, Ready: func() { close(ready) }}
	r.set = newFakeSet(true, box(1, "isolate"))
	f := newFake()
	a := assemble(cfg, r.set, policy.NewStore("", time.Now), r.journal(), r.host.opener, []feature.Feature{f}, ordinary())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatalf("it does not start: %v", err)
	}
	for _, what := range []string{"the metrics page is not served", "the socket for containers is not served"} {
		r.until("the log says that "+what, func() bool { return strings.Contains(log.String(), what) })
	}
	taken.Close()
	r.until("the metrics page is served", func() bool {
		resp, err := http.Get("http://" + addr + "/metrics")
		return err == nil && resp.Body.Close() == nil && resp.StatusCode == http.StatusOK
	})
	http.DefaultClient.CloseIdleConnections()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// safeBuffer is a log that is read while it is written.
type safeBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func TestMetricsAddr(t *testing.T) {
	for addr, want := range map[string]string{
		"": "", "127.0.0.1:9643": "", "unix:/run/fairlead/metrics.sock": "", "metrics.example.com:9643": "",
		":9643": "would be open on every address", "unix:metrics.sock": "too many colons|unknown port|missing port", "nonsense": "missing port",
	} {
		err := checkMetricsAddr(addr)
		if want == "" && err != nil || want != "" && (err == nil || !regexp.MustCompile(want).MatchString(err.Error())) {
			t.Errorf("%q: %v, want %q", addr, err, want)
		}
	}
	path := filepath.Join(t.TempDir(), "m")
	l, err := new(Agent).listenMetrics("unix:" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o660 {
		t.Errorf("%v, %v; want a socket of mode 0660", info, err)
	}
}

// An agent whose list of containers hangs gives no sign of life, so that systemd
// starts another one.
func TestAgentWithHungSet(t *testing.T) {
	r := newRig(t)
	synctest.Test(t, func(t *testing.T) {
		set, signs := newFakeSet(true), atomic.Int64{}
		cfg := Config{StateDir: r.state, Log: quiet(), Alive: func() { signs.Add(1) }}
		a := assemble(cfg, set, policy.NewStore("", time.Now), r.journal(), r.host.opener, nil, ordinary())
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		in := func(d time.Duration) int64 {
			was := signs.Load()
			time.Sleep(d)
			return signs.Load() - was
		}
		work := func(began time.Time) { set.mu.Lock(); set.busy = began; set.mu.Unlock() }
		if n := in(time.Minute); n < 50 {
			t.Errorf("%d signs of life in a minute", n)
		}
		work(time.Now())
		if n := in(hung); n < 20 {
			t.Errorf("%d signs of life in the first %v of a look", n, hung)
		}
		time.Sleep(2 * time.Second)
		if n := in(time.Minute); n != 0 {
			t.Errorf("%d signs of life while it hangs", n)
		}
		work(time.Time{})
		if n := in(time.Minute); n < 50 {
			t.Errorf("%d signs of life in the minute after that", n)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
