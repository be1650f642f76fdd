package kernel

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Tidy removes only an empty cgroup of a container that has ended, and on v2 only a runtime's.
func TestTidy(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	if cg.V2 == "" || cg.CPU == "" {
		testkit.Skip(t, "no cgroup v2 tree, or no cpu controller")
	}
	v2 := filepath.Dir(cg.V2) == filepath.Dir(cg.CPU)
	made := func(name string, lives bool) (dir string, id uint64) {
		t.Helper()
		both := cg.Child(t, name)
		id, err := cgroup.ID(both.V2)
		testkit.Must(t, err)
		switch {
		case lives && v2:
			id++ // another cgroup that has taken the name
		case !lives && !v2:
			testkit.Must(t, os.Remove(both.V2))
		}
		return both.CPU, id
	}
	runtimes := func(name string) string { return name + "-" + strings.Repeat("0123456789abcdef", 4) }
	ended, endedID := made(runtimes("ended"), false)
	lives, livesID := made(runtimes("lives"), true)
	busy, busyID := made(runtimes("busy"), false)
	users, usersID := made("users", !v2)
	testkit.CG{CPU: busy}.Sleeper(t)

	entry := func(kind, dir string, id uint64) journal.Outcome {
		if v2 && kind == sched.KindKthread {
			dir = filepath.Join(dir, "fairlead") // which has gone, or is empty
		}
		return journal.Outcome{Result: journal.Gone, Entry: journal.Entry{
			Ref: journal.Ref{Kind: kind, Object: "1:1:" + filepath.Dir(cg.CPU)}, Wrote: dir, Owner: journal.Owner{Container: id},
		}}
	}
	other, otherID := made(runtimes("other"), false)
	queue, _ := made(runtimes("queue"), false) // a thread that serves the whole host was in it
	if v2 {
		testkit.Must(t, os.Mkdir(filepath.Join(queue, "fairlead"), 0o755))
	}
	failed := entry(sched.KindKthread, other, otherID)
	failed.Err = errors.New("not restored")
	outside := t.TempDir()
	out := []journal.Outcome{
		entry(sched.KindKthread, ended, endedID), entry(sched.KindKthread, ended, endedID),
		entry(sched.KindKthread, lives, livesID), entry(sched.KindKthread, busy, busyID), entry(sched.KindKthread, users, usersID),
		entry(sched.KindKthread, queue, 0),
		entry(cgroup.KindFile, other, otherID), failed,
		entry(sched.KindKthread, outside, 0), entry(sched.KindKthread, filepath.Dir(cg.CPU), 0),
	}
	testkit.Check(t, Tidy(Default(), out))
	for _, dir := range []string{lives, busy, users, other, outside} {
		testkit.Is(t, "it removed "+dir, testkit.Err(os.Stat(dir)), nil)
	}
	for _, dir := range []string{ended, queue} {
		testkit.Is(t, dir, testkit.Err(os.Stat(dir)), os.ErrNotExist)
	}
}

// Without its journal, an agent knows what an earlier one has made by its mark, and takes none of it
// for the owner's.
func TestReclaim(t *testing.T) {
	testkit.OnKernels(t)
	at := testkit.NetNS(t)
	at.Bind(t)
	testkit.Veth(t, at, "u0", testkit.NetNS(t), "u1")
	ns, err := netdev.Open(at.Path)
	testkit.Must(t, err)
	defer ns.Close()
	index, err := ns.Index("u0")
	testkit.Must(t, err)
	ours, ifb := qdisc.Root(ns, index), ns.IFB(index, true)
	read := func(k journal.Knob) string {
		t.Helper()
		v, err := k.Read()
		testkit.Must(t, err)
		return v
	}
	r := Default()
	r.Proc = t.TempDir()
	testkit.Must(t, os.MkdirAll(filepath.Join(r.Proc, "self/ns"), 0o700))
	testkit.Must(t, os.Symlink(at.Path, filepath.Join(r.Proc, "self/ns/net")))
	by := journal.Owner{Feature: "traffic"}
	for name, next := range map[string]func(*journal.Journal) error{
		"reclaimed": func(j *journal.Journal) error { return Reclaim(r, j, "traffic") },
		"turned": func(j *journal.Journal) error {
			return errors.Join(j.Turn(ifb, netdev.OurIFB, by), j.Turn(ours, qdisc.Ours(qdisc.KindHTB), by))
		},
	} {
		before := read(ours)
		j := testkit.JournalIn(t, t.TempDir(), journal.Open)
		testkit.Must(t, errors.Join(j.Turn(ifb, netdev.OurIFB, by), j.Turn(ours, qdisc.Ours(qdisc.KindHTB), by), j.Close()))
		j = testkit.JournalIn(t, t.TempDir(), journal.Open)
		testkit.Must(t, errors.Join(next(j), next(j)))
		if n := len(j.Entries()); n != 2 {
			t.Errorf("%s: %d entries, want two: %+v", name, n, j.Entries())
		}
		_, err := j.Restore(Opener(Default()), nil)
		testkit.Must(t, err)
		if read(ours) != before || read(ifb) != netdev.NoDevice {
			t.Errorf("%s: in the end %s and %s", name, read(ours), read(ifb))
		}
	}
}
