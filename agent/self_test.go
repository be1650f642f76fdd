package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// The test binary is also what runs inside the containers of these tests.
const childEnv = "FAIRLEAD_TEST_CHILD"

func TestMain(m *testing.M) {
	switch role, arg, _ := strings.Cut(os.Getenv(childEnv), " "); role {
	case "self":
		io.Copy(io.Discard, os.Stdin) // until we have been put into the cgroup
		askSelf(arg)
	case "panics":
		panicking(arg)
	default:
		if status, ok := faults.Reexec(rounds)(os.Args); ok {
			os.Exit(status)
		}
		testkit.Main(m)
	}
}

// askSelf prints the report of the agent at socket on this process.
func askSelf(socket string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c := api.Dial(socket)
	s, err := c.Self(ctx)
	if err == nil {
		json.NewEncoder(os.Stdout).Encode(s)
		// Nothing but itself is to be had here.
		if _, err = c.Containers(ctx); err == nil {
			err = errors.New("a container sees the list of containers")
		} else {
			err = nil
		}
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// selfIn asks from within a cgroup.
func selfIn(t *testing.T, r *rig, cg *testkit.CG) (out string, err error) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"=self "+r.agent.cfg.SelfSocket)
	in, err := cmd.StdinPipe()
	testkit.Must(t, err)
	var buf strings.Builder
	cmd.Stdout = &buf
	testkit.Must(t, cmd.Start())
	if cg != nil {
		cg.Add(t, cmd.Process.Pid)
	}
	in.Close()
	err = cmd.Wait()
	return buf.String(), err
}

func TestSelf(t *testing.T) {
	testkit.NeedRoot(t)
	mine, others := testkit.Cgroup(t), testkit.Cgroup(t)
	if mine.V2 == "" {
		testkit.Skip(t, "no cgroup v2 tree")
	}
	var ids [2]container.ID
	for i, cg := range []testkit.CG{mine, others} {
		id, err := cgroup.ID(cg.V2)
		testkit.Must(t, err)
		ids[i] = container.ID(id)
	}
	r := newRig(t, ids[:]...)
	r.accounts = &netcpu.Accounts{Since: time.Unix(1_800_000_000, 0), Meter: &fakeMeter{now: account.Reading{
		Accounts: map[container.ID]account.Account{
			ids[0]: {Receive: kinds{work(time.Second, 1000, 0)}, Own: 400 * time.Millisecond},
			ids[1]: {Receive: kinds{work(2*time.Second, 777777, 0)}},
		},
		Thefts: map[account.Pair]time.Duration{
			theft(account.Task, ids[0], ids[1]): 3 * time.Second, theft(account.Task, ids[1], ids[0]): 500 * time.Millisecond,
			theft(account.Idle, 0, ids[0]): 100 * time.Millisecond,
		},
	}}}
	a, b := box(ids[0], "isolate"), box(ids[1], "isolate")
	a.Name, b.Name = "mine", "the other"
	a.Cgroup.V2, b.Cgroup.V2 = mine.V2, others.V2
	a.Started = r.accounts.Since.Add(time.Second)
	ns, err := netdev.InodeOf("/proc", os.Getpid()) // a process may move into another container's network
	testkit.Must(t, err)
	b.NetNS = ns
	r.set.set(true, a, b)
	r.start()
	// A scrape may be at the accounts, and ask for containers from there: who reads them must not
	// keep it from that.
	r.accounts.Meter.(*fakeMeter).during.Store(func() { (view{r.agent}).Container(ids[0]) })
	r.untilValue(ids[0], "isolated")
	r.untilValue(ids[1], "isolated")

	out, err := selfIn(t, r, &mine)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var s api.Self
	testkit.Must(t, json.Unmarshal([]byte(out), &s))
	if s.ID != api.ID(ids[0]) || s.Name != "mine" || len(s.Features) != 1 || s.Features[0].State != api.StateDone {
		t.Errorf("self %+v", s)
	}
	if len(s.Measured) != 1 || len(s.Measured[0].Samples) != 1 || s.Measured[0].Samples[0].Container != api.ID(ids[0]) {
		t.Errorf("measured %+v", s.Measured)
	}
	if n := s.NetCPU; n == nil || n.Receive != 1 || n.Stolen != 3 || len(n.Work) != 1 || n.Work[0].Packets != 1000 || n.Tasks <= 0 {
		t.Errorf("netcpu %+v", n)
	}
	// Neither the robber, nor what its packets did to others.
	for _, word := range []string{"stolen_by", "taken_seconds", "culprit", "matrix", "own_seconds", "777777"} {
		if strings.Contains(out, word) {
			t.Errorf("it sees %s: %s", word, out)
		}
	}
	if strings.Contains(out, "the other") || strings.Contains(out, ids[1].String()) {
		t.Errorf("it sees another container: %s", out)
	}

	// We are in no container ourselves.
	if out, err := selfIn(t, r, nil); err == nil || !strings.Contains(out, "no container") {
		t.Errorf("from outside: %v: %s", err, out)
	}
}
