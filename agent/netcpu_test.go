package agent

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/expfmt"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/metrics"
)

// fakeMeter returns given values, also to the agent's overview, which reads when it likes.
type fakeMeter struct {
	now    account.Reading
	mu     sync.Mutex // of err
	err    error
	during atomic.Value // a func() called in Read; none: nothing
}

func (m *fakeMeter) Read() (account.Reading, error) {
	if during, ok := m.during.Load().(func()); ok {
		during()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now, m.err
}

// fail lets Read return an error from now on.
func (m *fakeMeter) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
}

const ms = time.Millisecond

type kinds = [account.Protocols]account.Work

func work(cpu time.Duration, packets, bytes uint64) account.Work {
	return account.Work{CPU: cpu, Packets: packets, Bytes: bytes}
}

func theft(kind account.PartyKind, victim, culprit container.ID) account.Pair {
	return account.Pair{Victim: account.Party{Container: victim, Kind: kind}, Culprit: culprit}
}

// robbery is a flood that is received in the time of a victim, of an ended container, of tasks of
// the host, of ksoftirqd, and of no task.
func robbery() account.Reading {
	return account.Reading{
		Taken: time.Unix(1_800_000_010, 0), Softirq: 3100 * ms, Thread: 100 * ms, Lost: 5, Gone: 20 * ms,
		Accounts: map[container.ID]account.Account{
			0:  {Receive: kinds{account.Other: work(50*ms, 100, 6000)}},
			1:  {Receive: kinds{work(3000*ms, 1_000_000, 1_400_000_000), work(90*ms, 1000, 0)}, Send: kinds{account.TCP: work(10*ms, 10, 40)}, Own: 1000 * ms},
			2:  {Send: kinds{account.TCP: work(20*ms, 40, 2000)}, Own: 20 * ms},
			77: {Receive: kinds{work(30*ms, 3, 3)}},
		},
		Thefts: map[account.Pair]time.Duration{
			theft(account.Task, 1, 1):      1000 * ms, // its own
			theft(account.Task, 2, 1):      1500 * ms,
			theft(account.NAPI, 2, 1):      100 * ms,
			theft(account.Task, 2, 0):      25 * ms,
			theft(account.Task, 1, 77):     30 * ms,
			theft(account.Task, 9, 1):      50 * ms,
			theft(account.Task, 0, 1):      200 * ms,
			theft(account.NAPI, 0, 1):      100 * ms,
			theft(account.Ksoftirqd, 0, 1): 40 * ms,
			theft(account.Idle, 0, 1):      110 * ms,
			theft(account.Task, 0, 0):      25 * ms,
			theft(account.Task, 2, 2):      20 * ms,
			theft(account.Task, 3, 1):      0,
		},
	}
}

func TestNetCPU(t *testing.T) {
	r := newRig(t)
	since := time.Unix(1_800_000_000, 0)
	m := &fakeMeter{now: robbery()}
	r.accounts = &netcpu.Accounts{Since: since, Meter: m}
	ended := box(77, "")
	ended.Name = "was here"
	r.set.set(true, ended)
	r.set.set(true, box(1, ""), box(2, ""), box(3, ""))
	r.start()

	want := api.NetCPU{
		Since: since, Taken: m.now.Taken, Softirq: 3.1, Thread: 0.1, Charged: 3.22, Lost: 5,
		System: api.NetCPUAccount{Name: "system", Receive: 0.05, Taken: 0.025, Work: []api.NetCPUWork{
			{Direction: "receive", Protocol: "other", Seconds: 0.05, Packets: 100, Bytes: 6000, Each: 500_000},
		}},
		Accounts: []api.NetCPUAccount{
			{Container: 1, Name: "box-1", Receive: 3.09, Send: 0.01, Own: 1, Stolen: 0.03, Taken: 1.85,
				StolenBy: []api.NetCPUCulprit{{Container: 77, Name: "was here", Seconds: 0.03}},
				Work: []api.NetCPUWork{
					{Direction: "receive", Protocol: "udp", Seconds: 3, Packets: 1_000_000, Bytes: 1_400_000_000, Each: 3000},
					{Direction: "receive", Protocol: "tcp", Seconds: 0.09, Packets: 1000, Each: 90_000},
					{Direction: "send", Protocol: "tcp", Seconds: 0.01, Packets: 10, Bytes: 40, Each: 1_000_000},
				}},
			{Container: 77, Name: "was here", Ended: true, Receive: 0.03, Taken: 0.03,
				Work: []api.NetCPUWork{{Direction: "receive", Protocol: "udp", Seconds: 0.03, Packets: 3, Bytes: 3, Each: 1e7}}},
			{Container: 2, Name: "box-2", Send: 0.02, Own: 0.02, Stolen: 1.625,
				StolenBy: []api.NetCPUCulprit{{Container: 1, Name: "box-1", Seconds: 1.6}, {Name: "system", Seconds: 0.025}},
				Work:     []api.NetCPUWork{{Direction: "send", Protocol: "tcp", Seconds: 0.02, Packets: 40, Bytes: 2000, Each: 500_000}}},
			{Container: 9, Ended: true, Stolen: 0.05, StolenBy: []api.NetCPUCulprit{{Container: 1, Name: "box-1", Seconds: 0.05}}},
			{Container: 3, Name: "box-3"},
		},
		Matrix: []api.NetCPUTheft{
			{Kind: "task", Victim: 2, VictimName: "box-2", Culprit: 1, CulpritName: "box-1", Seconds: 1.5},
			{Kind: "task", Culprit: 1, CulpritName: "box-1", Seconds: 0.2},
			{Kind: "idle", Culprit: 1, CulpritName: "box-1", Seconds: 0.11},
			{Kind: "napi", Culprit: 1, CulpritName: "box-1", Seconds: 0.1},
			{Kind: "napi", Victim: 2, VictimName: "box-2", Culprit: 1, CulpritName: "box-1", Seconds: 0.1},
			{Kind: "task", Victim: 9, Culprit: 1, CulpritName: "box-1", Seconds: 0.05},
			{Kind: "ksoftirqd", Culprit: 1, CulpritName: "box-1", Seconds: 0.04},
			{Kind: "task", Victim: 1, VictimName: "box-1", Culprit: 77, CulpritName: "was here", Seconds: 0.03},
			{Kind: "task", Victim: 2, VictimName: "box-2", CulpritName: "system", Seconds: 0.025},
		},
	}
	near := cmp.Comparer(func(x, y float64) bool { return x-y < 1e-9 && y-x < 1e-9 })
	got, err := r.client.NetCPU(t.Context(), "")
	if diff := cmp.Diff(want, got, near); err != nil || diff != "" {
		t.Errorf("all: %v (-want +got):\n%s", err, diff)
	}
	// What ran elsewhere is in the matrix: with what ran in own time it makes up the account.
	in := got.Accounts[0].Own
	for _, x := range got.Matrix {
		if x.Culprit == 1 {
			in += x.Seconds
		}
	}
	if in-got.Accounts[0].Network() > 1e-9 || got.Accounts[0].Network()-in > 1e-9 {
		t.Errorf("the account is %v, its parts are %v", got.Accounts[0].Network(), in)
	}

	got, err = r.client.NetCPU(t.Context(), "box-2")
	if err != nil || len(got.Accounts) != 1 || got.Accounts[0].Container != 2 || len(got.Matrix) != 3 || got.Softirq != 3.1 {
		t.Errorf("one: %v, %+v", err, got)
	}
	for ref, code := range map[string]string{"nobody": "not_found"} {
		var e *api.Error
		if _, err := r.client.NetCPU(t.Context(), ref); !errors.As(err, &e) || e.Code != code {
			t.Errorf("%s: %v", ref, err)
		}
	}

	m.fail(errors.New("map is gone"))
	if _, err := r.client.NetCPU(t.Context(), ""); err == nil || err.Error() != "read whose packets took whose CPU time: map is gone" {
		t.Errorf("a meter that fails: %v", err)
	}
	if s := r.accounts.Export(); len(s.Samples) != 0 {
		t.Errorf("a meter that fails gives %v", s)
	}
}

func TestNetCPUUnavailable(t *testing.T) {
	for _, x := range []struct {
		accounts *netcpu.Accounts
		want     string
	}{
		{nil, "this agent has no report of it"},
		{&netcpu.Accounts{Meter: &fakeMeter{err: fmt.Errorf("netcpu: %w: no BTF", netcpu.ErrNoAccounts)}}, "not accounted for: no BTF"},
	} {
		r := newRig(t)
		r.accounts = x.accounts
		r.start()
		var e *api.Error
		if _, err := r.client.NetCPU(t.Context(), ""); !errors.As(err, &e) || e.Status != http.StatusServiceUnavailable || e.Code != "unavailable" || !strings.Contains(e.Text, x.want) {
			t.Errorf("%v, want %q", err, x.want)
		}
	}
}

// page is the metrics page's series of netcpu, without those labels that are empty.
func page(t *testing.T, a *Agent) []string {
	t.Helper()
	families, err := metrics.New(view{a}).Gather()
	testkit.Must(t, err)
	var out strings.Builder
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "fairlead_netcpu") || f.GetName() == "fairlead_metrics_refused" {
			testkit.Must(t, testkit.Err(expfmt.MetricFamilyToText(&out, f)))
		}
	}
	text := out.String()
	for _, empty := range []string{"container", "device", "id", "namespace", "pod"} {
		text = strings.ReplaceAll(text, empty+`="",`, "")
		text = strings.ReplaceAll(text, ","+empty+`=""`, "")
	}
	return slices.DeleteFunc(strings.Split(strings.TrimSpace(text), "\n"), func(l string) bool { return strings.HasPrefix(l, "#") || strings.Contains(l, "_test_") })
}

func TestNetCPUMetrics(t *testing.T) {
	r := newRig(t)
	r.accounts = &netcpu.Accounts{Meter: &fakeMeter{now: robbery()}}
	r.set.set(true, box(1, ""), box(2, ""))
	r.start()
	r.until("both have a target", func() bool { _, ok := (view{r.agent}).Container(2); return ok })
	want := []string{
		`fairlead_metrics_refused 0`,
		`fairlead_netcpu_lost_events_total{pod=""} 5`,
		`fairlead_netcpu_measured_seconds_total{where="softirq"} 3.1`,
		`fairlead_netcpu_measured_seconds_total{where="thread"} 0.1`,
		`fairlead_netcpu_packets_total{direction="receive",protocol="other"} 100`,
		`fairlead_netcpu_packets_total{container="box-1",direction="receive",id="1",protocol="tcp"} 1000`,
		`fairlead_netcpu_packets_total{container="box-1",direction="receive",id="1",protocol="udp"} 1e+06`,
		`fairlead_netcpu_packets_total{container="box-1",direction="send",id="1",protocol="tcp"} 10`,
		`fairlead_netcpu_packets_total{container="box-2",direction="send",id="2",protocol="tcp"} 40`,
		`fairlead_netcpu_seconds_total{direction="receive",protocol="other"} 0.05`,
		`fairlead_netcpu_seconds_total{container="box-1",direction="receive",id="1",protocol="tcp"} 0.09`,
		`fairlead_netcpu_seconds_total{container="box-1",direction="receive",id="1",protocol="udp"} 3`,
		`fairlead_netcpu_seconds_total{container="box-1",direction="send",id="1",protocol="tcp"} 0.01`,
		`fairlead_netcpu_seconds_total{container="box-2",direction="send",id="2",protocol="tcp"} 0.02`,
		`fairlead_netcpu_stolen_seconds_total{container="box-1",id="1"} 0.03`,
		`fairlead_netcpu_stolen_seconds_total{container="box-2",id="2"} 1.625`,
		`fairlead_netcpu_system_seconds_total{pod=""} 0.05`,
		`fairlead_netcpu_taken_seconds_total{container="box-1",id="1"} 1.85`,
		`fairlead_netcpu_theft_seconds_total{culprit="box-1",culprit_id="1",kind="idle",victim="host"} 0.11`,
		`fairlead_netcpu_theft_seconds_total{culprit="box-1",culprit_id="1",kind="ksoftirqd",victim="host"} 0.04`,
		`fairlead_netcpu_theft_seconds_total{culprit="box-1",culprit_id="1",kind="napi",victim="box-2",victim_id="2"} 0.1`,
		`fairlead_netcpu_theft_seconds_total{culprit="box-1",culprit_id="1",kind="napi",victim="host"} 0.1`,
		`fairlead_netcpu_theft_seconds_total{culprit="box-1",culprit_id="1",kind="task",victim="box-2",victim_id="2"} 1.5`,
		`fairlead_netcpu_theft_seconds_total{culprit="box-1",culprit_id="1",kind="task",victim="host"} 0.2`,
		`fairlead_netcpu_theft_seconds_total{culprit="other",kind="other",victim="other"} 0.08`,
		`fairlead_netcpu_theft_seconds_total{culprit="system",kind="task",victim="box-2",victim_id="2"} 0.025`,
	}
	got := page(t, r.agent)
	slices.Sort(want)
	slices.Sort(got)
	testkit.Same(t, "page", want, got)
	// The series end with either of the two.
	r.set.set(true, box(2, ""))
	r.until("1 has gone", func() bool { _, ok := (view{r.agent}).Container(1); return !ok })
	if got := strings.Join(page(t, r.agent), "\n"); strings.Contains(got, "box-1") || !strings.Contains(got, "box-2") {
		t.Errorf("after 1 has ended:\n%s", got)
	}
}

// What a container used before the accounts began is not in them, what it has
// used since is, whether it ran by then or not.
func TestUsageSince(t *testing.T) {
	r := newRig(t)
	since := time.Unix(1_800_000_000, 0)
	r.accounts = &netcpu.Accounts{Since: since, Meter: &fakeMeter{now: robbery()}}
	stat := func(dir, text string) {
		t.Helper()
		testkit.Must(t, os.WriteFile(filepath.Join(dir, "cpu.stat"), []byte(text), 0o644))
	}
	old, young, moved := box(1, ""), box(2, ""), box(3, "")
	old.Started, young.Started, moved.Started = since.Add(-time.Hour), since.Add(time.Second), since.Add(-time.Minute)
	for _, c := range []*string{&old.Cgroup.V2, &young.Cgroup.V2, &moved.Cgroup.V2} {
		*c = t.TempDir()
		stat(*c, "usage_usec 3000000\nnr_periods 90\nnr_throttled 40\nthrottled_usec 2000000\n")
	}
	old.Cgroup.CPU, young.Cgroup.CPU, moved.Cgroup.CPU = old.Cgroup.V2, young.Cgroup.V2, moved.Cgroup.V2
	r.set.set(true, old, young, moved)
	r.start()
	testkit.Must(t, testkit.Err(r.client.NetCPU(t.Context(), "")))

	const later = "usage_usec 3500000\nnr_periods 95\nnr_throttled 41\nthrottled_usec 2250000\n"
	stat(old.Cgroup.V2, later)
	stat(young.Cgroup.V2, later)
	elsewhere := t.TempDir()
	stat(elsewhere, "nr_periods 2\nnr_throttled 1\nthrottled_time 100000000\n")
	moved.Cgroup.CPU = elsewhere
	r.set.set(true, old, young, moved)
	want := map[string]api.NetCPUAccount{
		"box-1": {Tasks: 0.5, Throttled: 0.25, Periods: 1},
		"box-2": {Tasks: 3.5, Throttled: 2.25, Periods: 41},
		"box-3": {Tasks: 0, Throttled: 0.1, Periods: 1},
	}
	r.until("what was used since", func() bool {
		n, err := r.client.NetCPU(t.Context(), "")
		testkit.Must(t, err)
		right := 0
		for _, x := range n.Accounts {
			w, ok := want[x.Name]
			if ok && x.Tasks == w.Tasks && x.Throttled == w.Throttled && x.Periods == w.Periods {
				right++
			}
		}
		return right == len(want)
	})
	samples := make(map[string]float64)
	for _, snap := range (view{r.agent}).Snapshots() {
		for _, x := range snap.Samples {
			samples[fmt.Sprintf("%s %d", x.Name, x.Container)] = x.Value
		}
	}
	for name, value := range map[string]float64{
		"netcpu_tasks_seconds_total 1": 0.5, "netcpu_throttled_seconds_total 1": 0.25,
		"netcpu_tasks_seconds_total 2": 3.5, "netcpu_throttled_seconds_total 2": 2.25,
	} {
		if samples[name] != value {
			t.Errorf("%s is %v on the metrics page, want %v", name, samples[name], value)
		}
	}
}
