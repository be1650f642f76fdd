package agent

import (
	"bytes"
	"fmt"
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
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// Any local user can take the address of the metrics page. The agent works without, and serves it
// once it can.
func TestAgentWithoutMetrics(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	defer taken.Close()
	addr := taken.Addr().String()
	r := newRig(t, 1)
	var log safeBuffer
	ready := make(chan struct{})
	cfg := Config{StateDir: r.state, Log: slog.New(slog.NewTextHandler(&log, nil)), MetricsAddr: addr, SelfSocket: r.state, Ready: func() { close(ready) }}
	r.set = newFakeSet(true, box(1, "isolate"))
	f := newFake()
	a := assemble(cfg, r.set, policy.NewStore("", time.Now), r.journal(), r.host.opener, []feature.Feature{f}, ordinary())
	stop := testkit.Background(t, a.Run)
	select {
	case <-ready:
	case <-time.After(90 * time.Second):
		t.Fatalf("it does not start: %v", stop())
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
	testkit.Check(t, stop())
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
	testkit.Must(t, err)
	defer l.Close()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o660 {
		t.Errorf("%v, %v; want a socket of mode 0660", info, err)
	}
}

// looper is a feature with a loop of its own, and decisions.
type looper struct {
	*fake
	loop   feature.Loop
	decide chan struct{} // Decide waits for it; nil: it does not
}

func (l *looper) Loops() []*feature.Loop                  { return []*feature.Loop{&l.loop} }
func (l *looper) Adopt([]journal.Entry) []policy.Decision { return nil }
func (l *looper) Decide([]policy.Target, bool) ([]policy.Decision, error) {
	l.fake.mu.Lock()
	wait := l.decide
	l.fake.mu.Unlock()
	if wait != nil {
		<-wait
	}
	return nil, nil
}

// An agent with a hanging loop, of the Set or of a feature, gives no sign of life, so that systemd
// starts another one. The log names the loop, once.
func TestAgentWithHungLoop(t *testing.T) {
	for loop, hang := range map[string]func(*fakeSet, *looper) (goOn func()){
		"the list of containers": func(s *fakeSet, _ *looper) func() {
			work := func(began time.Time) { s.mu.Lock(); s.busy = began; s.mu.Unlock() }
			work(time.Now())
			return func() { work(time.Time{}) }
		},
		"netcpu, of its own": func(_ *fakeSet, l *looper) func() { l.loop.Begin(); return l.loop.End },
		"netcpu, decisions": func(_ *fakeSet, l *looper) func() {
			wait := make(chan struct{})
			set := func(c chan struct{}) { l.fake.mu.Lock(); l.decide = c; l.fake.mu.Unlock() }
			set(wait)
			return func() { set(nil); close(wait) }
		},
	} {
		t.Run(loop, func(t *testing.T) { testHungLoop(t, loop, hang) })
	}
}

func testHungLoop(t *testing.T, loop string, hang func(*fakeSet, *looper) (goOn func())) {
	r := newRig(t)
	synctest.Test(t, func(t *testing.T) {
		set, signs, log := newFakeSet(true), atomic.Int64{}, bytes.Buffer{}
		l := &looper{fake: newFake(), loop: feature.Loop{Name: "of its own"}}
		cfg := Config{StateDir: r.state, Log: slog.New(slog.NewTextHandler(&log, nil)), Alive: func() { signs.Add(1) }}
		a := assemble(cfg, set, policy.NewStore("", time.Now), r.journal(), r.host.opener, []feature.Feature{l}, ordinary())
		stop := testkit.Background(t, a.Run)
		in := func(d time.Duration) int64 {
			was := signs.Load()
			time.Sleep(d)
			return signs.Load() - was
		}
		if n := in(time.Minute); n < 50 {
			t.Errorf("%d signs of life in a minute", n)
		}
		goOn := hang(set, l)
		if n := in(hung); n < 20 {
			t.Errorf("%d signs of life in the first %v", n, hung)
		}
		time.Sleep(3 * time.Second)
		if n := in(time.Minute); n != 0 {
			t.Errorf("%d signs of life while it hangs", n)
		}
		goOn()
		time.Sleep(time.Second)
		if n := in(time.Minute); n < 50 {
			t.Errorf("%d signs of life in the minute after that", n)
		}
		testkit.Check(t, stop())
		if want := fmt.Sprintf("loop=%q", loop); strings.Count(log.String(), want) != 1 {
			t.Errorf("the log names it %d times, want once:\n%s", strings.Count(log.String(), want), &log)
		}
	})
}
