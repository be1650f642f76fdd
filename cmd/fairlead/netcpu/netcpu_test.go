package netcpu

import (
	"bytes"
	"context"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
)

// meterStub is an agent that returns one reading after the other, and then repeats the last.
type meterStub struct {
	serve.Backend
	mu       sync.Mutex
	readings []api.NetCPU
	err      error
}

func (s *meterStub) Report(_ context.Context, ask api.Ask) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return api.NetCPU{}, s.err
	}
	if ask.Container == "nobody" {
		return api.NetCPU{}, &api.Error{Status: http.StatusNotFound, Code: "not_found", Text: `no container "nobody" runs here`}
	}
	n := s.readings[0]
	if len(s.readings) > 1 {
		s.readings = s.readings[1:]
	}
	if ask.Container != "" {
		n.Accounts = append([]api.NetCPUAccount(nil), n.Accounts...)
		for i, a := range n.Accounts {
			if a.Name == ask.Container {
				n.Accounts = n.Accounts[i : i+1]
			}
		}
	}
	return n, nil
}

// metered runs netcpu against a stub with these readings.
func metered(t *testing.T, s *meterStub, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	return verbtest.Against(t, run, s, append([]string{"netcpu", "--interval", "100ms"}, args...)...)
}

// The instants of the fixed readings, in which 2 s pass.
func readingTimes() (start, first, second time.Time) {
	start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.Local)
	return start, start.Add(10 * time.Second), start.Add(12 * time.Second)
}

// flooded is the second of two readings: a flood takes the time of a victim, one container waits
// for its own quota, others do nothing.
func flooded() []api.NetCPU {
	start, first, second := readingTimes()
	victim := api.ID(4711)
	flood, slow, hostile := api.ID(4712), api.ID(4713), api.ID(4714)
	n := api.NetCPU{
		Since: start, Taken: second, Softirq: 2.1, Thread: 0.1, Charged: 2.18,
		System: api.NetCPUAccount{Name: "system", Receive: 0.02, Taken: 0.01, Work: []api.NetCPUWork{{Direction: "receive", Protocol: "other", Seconds: 0.02, Packets: 200, Bytes: 9000, Each: 1e5}}},
		Accounts: []api.NetCPUAccount{
			{Container: flood, Name: "flood", Tasks: 0.96, Receive: 2.06, Send: 0.02, Own: 0.9, Taken: 0.74, Stolen: 0.02, Dropped: 1_999_200,
				Ledger:   &api.NetCPULedger{Balance: -0.0123, Factor: 0.348875, Charged: 1, Credited: 0.02},
				StolenBy: []api.NetCPUCulprit{{Name: "system", Seconds: 0.02}},
				Work: []api.NetCPUWork{
					{Direction: "receive", Protocol: "udp", Seconds: 2.06, Packets: 686_667, Bytes: 961_333_800, Each: 3000},
					{Direction: "send", Protocol: "tcp", Seconds: 0.02, Packets: 40, Bytes: 2400, Each: 500_000},
				}},
			{Container: hostile, Name: "(idle: no loss)", Tasks: 0.002, Receive: 0.06, Own: 0.06,
				Work: []api.NetCPUWork{{Direction: "receive", Protocol: "tcp", Seconds: 0.06, Packets: 30, Bytes: 300, Each: 2e6}}},
			{Container: victim, Name: "a-victim-with-quite-a-long-name", Tasks: 1, Stolen: 0.64, Receive: 0.01, Own: 0.01,
				Ledger:   &api.NetCPULedger{Balance: 0.25, Factor: 1.2, Credited: 0.64},
				StolenBy: []api.NetCPUCulprit{{Container: flood, Name: "flood", Seconds: 0.62}, {Container: hostile, Name: "(idle: no loss)", Seconds: 0.01}, {Name: "system", Seconds: 0.01}},
				Work:     []api.NetCPUWork{{Direction: "send", Protocol: "other", Seconds: 0.01, Packets: 4, Bytes: 40, Each: 2.5e6}}},
			{Container: slow, Name: verbtest.Evil, Tasks: 0.4, Throttled: 0.8, Periods: 20, Stolen: 0.0004,
				Ledger:   &api.NetCPULedger{Balance: -0.0004, Factor: 0.999},
				StolenBy: []api.NetCPUCulprit{{Container: flood, Name: "flood", Seconds: 0.0004}}},
			{Container: 8, Name: "twin"}, {Container: 9, Name: "twin", Tasks: 0.1},
			{Container: 4700, Ended: true, Receive: 0.01, Work: []api.NetCPUWork{{Direction: "receive", Protocol: "udp", Seconds: 0.01, Packets: 1}}},
		},
		Matrix: []api.NetCPUTheft{
			{Kind: api.VictimTask, Victim: victim, VictimName: "a-victim-with-quite-a-long-name", Culprit: flood, CulpritName: "flood", Seconds: 0.52},
			{Kind: api.VictimIdle, Culprit: flood, CulpritName: "flood", Seconds: 0.4},
			{Kind: api.VictimTask, Culprit: flood, CulpritName: "flood", Seconds: 0.12},
			{Kind: api.VictimNAPI, Victim: victim, VictimName: "a-victim-with-quite-a-long-name", Culprit: flood, CulpritName: "flood", Seconds: 0.1},
			{Kind: api.VictimKsoftirqd, Culprit: flood, CulpritName: "flood", Seconds: 0.04},
			{Kind: api.VictimNAPI, Culprit: flood, CulpritName: "flood", Seconds: 0.02},
			{Kind: api.VictimTask, Victim: flood, VictimName: "flood", CulpritName: "system", Seconds: 0.02},
			{Kind: api.VictimTask, Victim: victim, VictimName: "a-victim-with-quite-a-long-name", CulpritName: "system", Seconds: 0.01},
			{Kind: api.VictimTask, Victim: victim, VictimName: "a-victim-with-quite-a-long-name", Culprit: hostile, CulpritName: "(idle: no loss)", Seconds: 0.01},
			{Kind: api.VictimTask, Victim: slow, VictimName: verbtest.Evil, Culprit: flood, CulpritName: "flood", Seconds: 0.0004},
		},
	}
	return []api.NetCPU{{Since: start, Taken: first}, n}
}

// printed checks the output, and that no line is too wide.
func printed(t *testing.T, want string, got string) {
	t.Helper()
	verbtest.Compare(t, want, got)
	for line := range strings.Lines(got) {
		if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > screen {
			t.Errorf("a line of %d columns: %s", n, line)
		}
	}
}

func TestNetCPUSummary(t *testing.T) {
	status, out, errs := metered(t, &meterStub{readings: flooded()})
	if status != cli.Done || errs != "" {
		t.Fatal(status, errs)
	}
	printed(t, `Percent of one CPU, over 2.0 s
CONTAINER             TASKS   RECV  SEND  STOLEN  TOOK   PPS    NS/PKT  HELD BACK BY
flood                  48.0  103.0   1.0     1.0  37.0  343k      3029  (system) 1.0
"(idle: no loss)"       0.1    3.0   0.0     0.0   0.0    15   2000000  -
(ended, id 4700)          -    0.5   0.0     0.0   0.0     0  10000000  -
a-victim-with-quite…   50.0    0.5   0.0    32.0   0.0     2   2500000  flood 31.0, "(idle: no loss…
"evil\x1b[31m\u202e…   20.0    0.0   0.0     0.0   0.0     0         -  own quota 40.0
twin 9                  5.0    0.0   0.0     0.0   0.0     0         -  -
(system)                  -    1.0   0.0       -   0.5   100         -  -

1 more container did nothing, and nothing was done for it.
Packets took 105.0 % in softirqs and 5.0 % in NAPI threads; 0.9 % of that was nobody's (system).
The accounts add up to 99.1 % of what was measured.

ENFORCED                         LIMIT %  BALANCE MS  DROPPED PPS
flood                                 35         -12        1.00M
a-victim-with-quite-a-long-name      120         250            0
`, out)
	_, out, _ = metered(t, &meterStub{readings: flooded()[1:]}, "--total")
	printed(t, `CPU seconds since 2026-03-01 12:00:00 (12.0 s)
CONTAINER             TASKS  RECV  SEND  STOLEN  TOOK  PACKETS    NS/PKT  HELD BACK BY
flood                  0.96  2.06  0.02    0.02  0.74     687k      3029  (system) 0.02
"(idle: no loss)"      0.00  0.06  0.00    0.00  0.00       30   2000000  -
a-victim-with-quite…   1.00  0.01  0.00    0.64  0.00        4   2500000  flood 0.62, "(idle: no lo…
"evil\x1b[31m\u202e…   0.40  0.00  0.00    0.00  0.00        0         -  own quota 0.80
twin 9                 0.10  0.00  0.00    0.00  0.00        0         -  -
(ended, id 4700)          -  0.01  0.00    0.00  0.00        1  10000000  -
(system)                  -  0.02  0.00       -  0.01      200         -  -

1 more container did nothing, and nothing was done for it.
Packets took 2.10 s in softirqs and 0.10 s in NAPI threads; 0.9 % of that was nobody's (system).
The accounts add up to 99.1 % of what was measured.

ENFORCED                         LIMIT %  BALANCE MS  DROPPED
flood                                 35         -12    2.00M
a-victim-with-quite-a-long-name      120         250        0
`, out)
}

func TestNetCPUMatrix(t *testing.T) {
	_, out, _ := metered(t, &meterStub{readings: flooded()}, "--matrix")
	printed(t, `Percent of one CPU, over 2.0 s
VICTIM \ CULPRIT              flood  (system)  "(idle: no loss…   ALL
a-victim-with-quite-a-long-…   31.0       0.5               0.5  32.0
flood                             -       1.0                 -   1.0
(tasks of the host)             6.0         -                 -   6.0
(ksoftirqd)                     2.0         -                 -   2.0
(NAPI threads of the host)      1.0         -                 -   1.0
(idle: no loss)                20.0         -                 -  20.0

Held back by its own quota, not by others: "evil\x1b[31m\u202e\u009b\x7f\n�" 40.0 %
`, out)

	// More culprits than fit: the largest are listed, the rest summed.
	many := flooded()
	for i := range 20 {
		many[1].Matrix = append(many[1].Matrix, api.NetCPUTheft{
			Kind: api.VictimTask, Victim: 4711, Culprit: api.ID(100 + i), CulpritName: "culprit-number-" + strings.Repeat("x", i), Seconds: 0.2,
		})
	}
	_, out, _ = metered(t, &meterStub{readings: many}, "--matrix")
	printed(t, `Percent of one CPU, over 2.0 s
VICTIM \ CULPRIT              flood  culprit-number-  culprit-number-x  20 OTHERS    ALL
a-victim-with-quite-a-long-…   31.0             10.0              10.0      181.0  232.0
flood                             -                -                 -        1.0    1.0
(tasks of the host)             6.0                -                 -          -    6.0
(ksoftirqd)                     2.0                -                 -          -    2.0
(NAPI threads of the host)      1.0                -                 -          -    1.0
(idle: no loss)                20.0                -                 -          -   20.0

Held back by its own quota, not by others: "evil\x1b[31m\u202e\u009b\x7f\n�" 40.0 %
`, out)
	if _, out, _ := metered(t, &meterStub{readings: many}, "--matrix", "--wide"); strings.Contains(out, "OTHERS") || !strings.Contains(out, "culprit-number-"+strings.Repeat("x", 19)) {
		t.Errorf("--wide:\n%s", out)
	}
}

func TestNetCPUOne(t *testing.T) {
	_, out, _ := metered(t, &meterStub{readings: flooded()}, "flood")
	printed(t, `flood (id 4712)
Percent of one CPU, over 2.0 s

CPU time of its tasks                   48.0
  of that, into the packets of others    1.0  STOLEN
CPU time of its packets                104.0  RECV and SEND
  of that, in its own time              45.0
  of that, in the time of others        37.0  TOOK
  of that, in nobody's                  22.0  idle CPUs, ksoftirqd, the host's NAPI threads

ENFORCED  LIMIT %  BALANCE MS  DROPPED PPS
flood          35         -12        1.00M

DIRECTION  PROTOCOL    CPU   PPS  NS/PKT  BYTES/PKT
receive    udp       103.0  343k    3000       1400
send       tcp         1.0    20  500000         60

WHOSE PACKETS TOOK ITS TIME  CPU
(system)                     1.0

WHOSE TIME ITS PACKETS TOOK       CPU
a-victim-with-quite-a-long-name  31.0
(idle: no loss)                  20.0
(tasks of the host)               6.0
(ksoftirqd)                       2.0
(NAPI threads of the host)        1.0
`, out)
	_, out, _ = metered(t, &meterStub{readings: flooded()}, verbtest.Evil)
	printed(t, `"evil\x1b[31m\u202e\u009b\x7f\n�" (id 4713)
Percent of one CPU, over 2.0 s

CPU time of its tasks                  20.0
  of that, into the packets of others   0.0  STOLEN
CPU time of its packets                 0.0  RECV and SEND
  of that, in its own time              0.0
  of that, in the time of others        0.0  TOOK
  of that, in nobody's                  0.0  idle CPUs, ksoftirqd, the host's NAPI threads
Kept from running by its own quota     40.0  in 20 periods

It had no packets.

Nobody's packets took its time.

Its packets took nobody's time.
`, out)
}

func TestNetCPUWithoutNews(t *testing.T) {
	start, first, second := readingTimes()
	empty := func(accounts ...api.NetCPUAccount) []api.NetCPU {
		return []api.NetCPU{{Since: start, Taken: first, Accounts: accounts}, {Since: start, Taken: second, Accounts: accounts}}
	}
	idle := api.NetCPUAccount{Container: 1, Name: "web", Tasks: 3}
	for _, x := range []struct {
		stub   *meterStub
		args   []string
		status int
		want   string
	}{
		{&meterStub{readings: empty()}, nil, cli.Done, "No container runs here, and no packet was handled in 2.0 s.\n"},
		{&meterStub{readings: empty(idle)}, nil, cli.Done, "No container did anything, and no packet was handled for one, in 2.0 s.\n"},
		{&meterStub{readings: empty(idle)}, []string{"--matrix"}, cli.Done, "In 2.0 s no packets took the time of anybody else.\n"},
		{&meterStub{readings: empty(idle)}, []string{"nobody"}, cli.Failed, "fairlead netcpu: no container \"nobody\" runs here\n`fairlead ps` lists those that do\n"},
		{&meterStub{err: &api.Error{Status: 503, Code: "unavailable", Text: "cannot be measured on this host: no\x1b BTF"}}, nil, cli.Failed,
			"fairlead netcpu: \"cannot be measured on this host: no\\x1b BTF\"\n`fairlead doctor` says what this host can do\n"},
	} {
		status, out, errs := metered(t, x.stub, x.args...)
		if status != x.status || out+errs != x.want {
			t.Errorf("%v: status %d\n%s", x.args, status, cmp.Diff(x.want, out+errs))
		}
	}
}

// The agent has restarted between two readings: the output shows its counts since then, over the
// time since then.
func TestNetCPUAfterARestart(t *testing.T) {
	two := flooded()
	two[0].Since = two[0].Since.Add(-time.Hour)
	two[0].Charged = 1e6
	_, out, errs := metered(t, &meterStub{readings: two})
	if errs != "" || !strings.HasPrefix(out, "Percent of one CPU, over 12.0 s\n") {
		t.Error(out, errs)
	}
}

// Watching prints again and again, and an interrupt is its ordinary end.
func TestNetCPUWatch(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	defer verbtest.Serve(t, path, &meterStub{readings: flooded()})()
	watching, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out := &countingWriter{text: "Packets took", after: 3, then: interrupt}
	var errs bytes.Buffer
	status := run(watching, cli.Env{Stdout: out, Stderr: &errs, Getenv: func(string) string { return "" }, Args: []string{"netcpu", "--watch", "--total", "--interval", "100ms", "--socket", path}})
	if status != cli.Done || errs.String() != "" || !strings.Contains(out.String(), "        0\n\nCPU seconds since") {
		t.Errorf("status %d, %s\n%s", status, errs.String(), out.String())
	}
}

// countingWriter calls then when text has been written often enough.
type countingWriter struct {
	bytes.Buffer
	text  string
	after int
	then  func()
}

func (w *countingWriter) Write(p []byte) (int, error) {
	n, err := w.Buffer.Write(p)
	if strings.Count(w.String(), w.text) >= w.after {
		w.then()
	}
	return n, err
}

// Whatever the numbers and names are, a table fits and drives no terminal.
func FuzzNetCPUTable(f *testing.F) {
	f.Add("web", 0.5, 1e-9, uint64(5), int64(2e9), false)
	f.Add(verbtest.Evil, 1e300, -1.0, ^uint64(0), int64(-1), true)
	f.Add("(system)", 0.0, 1e6, uint64(0), int64(0), true)
	f.Fuzz(func(t *testing.T, name string, x, y float64, packets uint64, span int64, total bool) {
		start, _, _ := readingTimes()
		n := api.NetCPU{
			Since: start, Taken: start.Add(time.Duration(span)), Softirq: x, Charged: y,
			Accounts: []api.NetCPUAccount{{Container: 1, Name: name, Tasks: x, Receive: y, Stolen: x, Taken: y, Throttled: x, Periods: packets,
				StolenBy: []api.NetCPUCulprit{{Container: 2, Name: name, Seconds: x}},
				Work:     []api.NetCPUWork{{Direction: name, Protocol: name, Seconds: y, Packets: packets, Bytes: packets}}}},
			Matrix: []api.NetCPUTheft{{Kind: name, Culprit: 2, CulpritName: name, Seconds: x}, {Kind: api.VictimTask, Victim: 1, Culprit: 2, Seconds: y}},
		}
		for _, matrix := range []bool{false, true} {
			for _, detail := range []bool{false, true} {
				var out bytes.Buffer
				newNetcpuView(n, netcpuFlags{matrix: matrix, ReadingFlags: &verb.ReadingFlags{Total: total}}).print(&out, detail)
				if bytes.ContainsFunc(out.Bytes(), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
					t.Errorf("control characters in %q", out.String())
				}
			}
		}
	})
}

// Where packets are dropped at the uplinks stands below it all; a reason is cut
// to the line, unless asked not to.
func TestNetCPUUplinks(t *testing.T) {
	readings := flooded()
	why := "early drop: attach XDP to device 2 in netns 4026531840: " + strings.Repeat("x", 80)
	readings[1].Uplinks = []api.NetCPUUplink{
		{Device: "eth0", NetNS: 4026531840, DropsBy: "xdp"},
		{Device: "eth1", NetNS: 4026531840, DropsBy: "tc", Why: why},
		{Device: "e\x1b[0m", NetNS: 4026531840, DropsBy: "tc"},
		{Device: "eth9", Why: "no such uplink"},
	}
	status, out, errs := metered(t, &meterStub{readings: readings})
	at := strings.Index(out, "UPLINK")
	if status != cli.Done || errs != "" || at < 0 {
		t.Fatal(status, errs, out)
	}
	printed(t, `UPLINK      DROPS BY  WHY NOT XDP
eth0        xdp       -
eth1        tc        early drop: attach XDP to device 2 in netns 4026531840: xxxxxxxxxxxxxxxxxxxxx…
"e\x1b[0m"  tc        -
eth9        -         no such uplink
`, out[at:])
	verbtest.Ended(t, cli.Done, why)(metered(t, &meterStub{readings: readings}, "--wide"))
	if _, out, _ := metered(t, &meterStub{readings: flooded()}); strings.Contains(out, "UPLINK") {
		t.Errorf("without uplinks:\n%s", out)
	}
}

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e, Flags) }
