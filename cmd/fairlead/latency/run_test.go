package latency

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/enter"
)

// runStub is an agent with a self socket, on which the caller is a container. The first request for
// records begins the recording, and the second returns them.
type runStub struct {
	verbtest.Stub
	records []api.LatencyRecord
	asked   chan struct{} // gets a token for each of the first three requests; nil: for none

	mu       sync.Mutex
	measured bool
	requests int
	by       int // the process for which the container is measured, or was
}

func (s *runStub) Caller(serve.Peer) api.ID { return 7 }

func (s *runStub) Report(_ context.Context, ask api.Ask) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m, ok := ask.Body.(api.LatencyMeasure); ok {
		s.measured, s.by = m.On, m.PID
		return api.LatencyMeasured{On: m.On}, nil
	}
	if s.asked != nil && s.requests < 3 {
		s.asked <- struct{}{}
	}
	if !s.measured {
		return nil, &api.Error{Status: 409, Code: "not_measured", Text: "the container's packets are not measured"}
	}
	if s.requests++; s.requests != 2 {
		return api.LatencyRecords{Records: []api.LatencyRecord{}}, nil
	}
	return api.LatencyRecords{Records: s.records}, nil
}

func (s *runStub) Command(ctx context.Context, ask api.Ask) (any, error) { return s.Report(ctx, ask) }

// trip returns the packets of a round trip.
func trip(peer string) []api.LatencyRecord {
	stack, at := 0.00001, time.Unix(1552589043, 0)
	return []api.LatencyRecord{
		{Time: at, Direction: "egress", Protocol: "icmp", From: "10.0.0.2", To: peer, Seq: 1, Stack: &stack},
		{Time: at.Add(time.Millisecond), Direction: "ingress", Protocol: "icmp", From: peer, To: "10.0.0.2", Seq: 1, Stack: &stack},
	}
}

// runSelf runs a program with latency run --self, until it or ctx ends.
func runSelf(ctx context.Context, t *testing.T, s *runStub, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "self")
	l, err := serve.ListenSelf(socket)
	testkit.Must(t, err)
	go serve.ServeSelf(t.Context(), l, s, slog.New(slog.DiscardHandler))
	var out, errs bytes.Buffer
	args = append([]string{"latency", "run", "--config=", "--self", "--self-socket", socket, "--"}, args...)
	status = run(ctx, cli.Env{Stdout: &out, Stderr: &errs, Getenv: func(string) string { return "" }, Args: args})
	return status, out.String(), errs.String()
}

func TestLatencyRun(t *testing.T) {
	s := &runStub{measured: true, records: trip("192.0.2.1")}
	status, out, errs := runSelf(t.Context(), t, s, "false")
	const measured = "1 round trips, median 1.01ms raw, 990us corrected; 0 packets without a reply"
	if status != cli.Failed || !strings.Contains(out, measured) || errs != "fairlead latency run: false ended with status 1\n" {
		t.Errorf("status %d: %s%s", status, out, errs)
	}

	// An interrupted run shows its measurements so far.
	s.asked, s.requests = make(chan struct{}), 0
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for range 3 { // then the second request has been answered
			<-s.asked
		}
		cancel()
	}()
	status, out, errs = runSelf(ctx, t, s, "sleep", "1000")
	if status != cli.Failed || !strings.Contains(out, measured) || errs != "fairlead latency run: interrupted\n" {
		t.Errorf("interrupted: status %d: %s%s", status, out, errs)
	}

	// A program that the host does not have.
	for name, want := range map[string]string{"fl-none": "there is no program fl-none on this host: run takes it from the host, not from the container; install it here"} {
		verbtest.Ended(t, cli.Failed, want)(runSelf(t.Context(), t, s, name))
	}
	t.Setenv("PATH", "/nowhere")
	testkit.Fails(t, "no ping", startable(exec.Command("ping")), "iputils-ping")
}

// If nothing was measured, the output has the reason and no median of 0.
func TestLatencyRunNothing(t *testing.T) {
	half := trip("192.0.2.1")
	half[0].Stack = nil
	for _, tt := range []struct {
		records []api.LatencyRecord
		want    string
	}{
		{nil, "no packet of the container was seen while it ran"},
		{trip("192.0.2.1")[:1], "1 packets were seen, and none was answered"},
		{half, "1 of 2 packets were not measured on their whole way"},
		{[]api.LatencyRecord{{Direction: "egress", Protocol: "icmp", From: "10.0.0.2", To: "127.0.0.1", Seq: 1}}, "127.0.0.1 is this host itself"},
	} {
		_, out, errs := runSelf(t.Context(), t, &runStub{measured: true, records: tt.records}, "true")
		if text := strings.Join(strings.Fields(out), " "); !strings.Contains(text, "No round trip was measured: "+tt.want) || strings.Contains(out, "median") {
			t.Errorf("want %q: %s%s", tt.want, out, errs)
		}
	}
	db := api.Container{Name: "db", Interfaces: []api.Interface{{Name: "eth0", Addrs: []string{"172.17.0.3/16"}}}}
	for peer, want := range map[string]string{"172.17.0.3": "container db of this host", "172.17.0.4": "", "ping": "", "127.0.0.1": "this host itself"} {
		testkit.Same(t, peer, want, onThisHost(peer, []api.Container{db}))
	}
}

// If policy does not have a container measured, this process does for the time of the run, and
// takes nothing of policy away.
func TestLatencyRunMeasures(t *testing.T) {
	s := &runStub{Stub: verbtest.Example()}
	socket := filepath.Join(t.TempDir(), "s")
	defer verbtest.Serve(t, socket, s)()
	c := api.Dial(socket)
	defer c.Close()
	var errs bytes.Buffer
	ask, err := (&packets{}).source(c, []string{"web-1"})
	testkit.Must(t, err)
	_, end, err := ask.begin(t.Context(), verb.Env{Env: cli.Env{Stderr: &errs}}, c, "web-1")
	if err != nil || !s.measured || !strings.Contains(errs.String(), "web-1 (docker, id 4711): its packets are measured while this runs") {
		t.Fatalf("%v: %s", err, &errs)
	}
	if err := end(); err != nil || s.measured || s.by != os.Getpid() {
		t.Errorf("ended: %v, %+v", err, s)
	}
	// A container that is measured anyway is not touched.
	s.measured = true
	if _, end, err = ask.begin(t.Context(), verb.Env{Env: cli.Env{Stderr: &errs}}, c, "web-1"); err != nil || end() != nil || !s.measured {
		t.Errorf("measured by policy: %v, %+v", err, s)
	}
}

// A number that the kernel has given to another process leads into no container.
func TestNumberUsedAgain(t *testing.T) {
	place, err := enter.Of(kernel.Default(), os.Getpid())
	testkit.Must(t, err)
	defer place.Close()
	ns, err := place.NetNS.Stat()
	testkit.Must(t, err)
	id, err := cgroup.ID(place.Groups[0].Dir)
	testkit.Must(t, err)
	is := api.Container{ID: api.ID(id), PID: os.Getpid(), NetNS: ns.Sys().(*syscall.Stat_t).Ino}
	other, elsewhere := is, is
	other.ID++
	elsewhere.NetNS++
	for name, c := range map[string]api.Container{"same": is, "other container": other, "other network": elsewhere} {
		if err := isOf(place, c); (err == nil) != (name == "same") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
