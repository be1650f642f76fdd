package account

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/sandbox"
)

// lab is a meter, and sandboxes for it to watch.
type lab struct {
	t     testing.TB
	m     *Meter
	boxes *sandbox.Host
	ids   map[*sandbox.Box]container.ID
	// outside is the tenant of world.
	outside container.ID
}

func newLab(t testing.TB) *lab {
	t.Helper()
	testkit.NeedRoot(t)
	// Where there is only busybox's, as in a guest that is emulated, shares of
	// CPU time would mean nothing either.
	if v, _ := exec.Command("ip", "-V").CombinedOutput(); !bytes.Contains(v, []byte("iproute2")) {
		testkit.Skip(t, "no iproute2")
	}
	h, err := sandbox.New(sandbox.Config{Dir: t.TempDir()})
	must(t, err)
	t.Cleanup(func() { must(t, h.Close()) })
	return &lab{t: t, m: newMeter(t), boxes: h, ids: make(map[*sandbox.Box]container.ID)}
}

func (l *lab) bare(name string) *sandbox.Box {
	l.t.Helper()
	b, err := l.boxes.Create(sandbox.Spec{Name: "acc-" + name, Bare: true})
	must(l.t, err)
	must(l.t, b.Sysctl("ipv6/conf/default/accept_dad", "0"))
	return b
}

// box makes a container; watch makes it a tenant.
func (l *lab) box(name string) *sandbox.Box {
	l.t.Helper()
	b := l.boxIn(name, nil)
	must(l.t, b.Sysctl("ipv6/conf/default/accept_dad", "0"))
	return b
}

// boxIn makes a container in the network namespace of another box.
func (l *lab) boxIn(name string, network *sandbox.Box) *sandbox.Box {
	l.t.Helper()
	b, err := l.boxes.Create(sandbox.Spec{Name: "acc-" + name, Network: network})
	must(l.t, err)
	var st unix.Stat_t
	must(l.t, unix.Stat(b.Cgroups()[0], &st))
	l.ids[b] = container.ID(st.Ino)
	return b
}

func (l *lab) ns(b *sandbox.Box) *netdev.NS {
	l.t.Helper()
	ns, err := netdev.Open(b.NetNS())
	must(l.t, err)
	l.t.Cleanup(func() { ns.Close() })
	return ns
}

// device names a device of a box for Watch.
func (l *lab) device(b *sandbox.Box, name string, hostEnd bool) Device {
	l.t.Helper()
	ns := l.ns(b)
	links, err := ns.Links(netdev.MostLinks)
	must(l.t, err)
	for _, k := range links {
		if k.Name == name {
			return Device{Netns: ns.Inode(), Ifindex: k.Index, HostEnd: hostEnd, Trusted: hostEnd}
		}
	}
	l.t.Fatalf("no device %s in %s", name, b.Name)
	return Device{}
}

func (l *lab) watch(b *sandbox.Box, devices ...Device) {
	l.t.Helper()
	must(l.t, l.m.Watch(Tenant{ID: l.ids[b], Cgroups: []uint64{uint64(l.ids[b])}, Devices: devices}))
}

// world makes a tenant of the namespace that stands for the world outside of
// the host: that one's work is done on this machine, too.
func (l *lab) world(b *sandbox.Box, dev string) {
	l.t.Helper()
	w := l.boxIn("world", b)
	l.outside = l.ids[w]
	l.watch(w, l.device(b, dev, false))
}

// wire joins two boxes, and rps says on which CPUs b's end works (a mask).
func (l *lab) wire(a, b sandbox.End, rps string) {
	l.t.Helper()
	must(l.t, sandbox.Wire(a, b))
	for _, e := range []sandbox.End{a, b} {
		if e.Addr.IsValid() { // one address of each family
			l.ip(e.Box, "addr", "add", fmt.Sprintf("fd00:66::%d/64", e.Addr.Addr().As4()[3]), "dev", e.Name, "nodad")
		}
	}
	if rps != "" {
		l.rps(b.Box, b.Name, rps)
	}
}

func (l *lab) rps(b *sandbox.Box, dev, mask string) {
	l.t.Helper()
	must(l.t, b.SetQueues(dev, "rx", "rps_cpus", func(int) string { return mask }))
}

func (l *lab) ip(b *sandbox.Box, args ...string) {
	l.t.Helper()
	l.run(b, "ip", args...)
}

// run runs a program of the host inside a box and waits for it.
func (l *lab) run(b *sandbox.Box, name string, args ...string) {
	l.t.Helper()
	p := l.start(b, name, args...)
	if err := p.Wait(); err != nil {
		l.t.Fatalf("%s %s in %s: %v", name, strings.Join(args, " "), b.Name, err)
	}
}

func (l *lab) start(b *sandbox.Box, name string, args ...string) *sandbox.Process {
	l.t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stderr = os.Stderr
	p, err := b.Start(cmd)
	must(l.t, err)
	return p
}

// load starts a generator in a box.
func (l *lab) load(b *sandbox.Box, cpu int, args ...string) *load.Board {
	l.t.Helper()
	board, _ := l.generator(b, cpu, args...)
	return board
}

func (l *lab) generator(b *sandbox.Box, cpu int, args ...string) (*load.Board, *sandbox.Process) {
	l.t.Helper()
	cmd, board, err := load.Command(args...)
	must(l.t, err)
	l.t.Cleanup(func() { board.Close() })
	p, err := b.Start(cmd, cpu)
	must(l.t, err)
	l.t.Cleanup(func() { p.Kill(); p.Wait() })
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	must(l.t, board.Await(ctx, p.Done()))
	return board, p
}

// delta is what happened between two readings.
type delta struct {
	l           *lab
	t           testing.TB // who is told what is wrong with it
	seconds     float64
	softirq     time.Duration
	thread      time.Duration
	accounts    map[container.ID]Account
	thefts      map[Theft]time.Duration // CPU 0 in the keys
	readingLost uint64
}

// trial keeps what is wrong with one measurement.
type trial struct {
	testing.TB
	wrong []string
}

func (t *trial) Error(args ...any) { t.wrong = append(t.wrong, fmt.Sprintln(args...)) }

func (t *trial) Errorf(format string, args ...any) {
	t.wrong = append(t.wrong, fmt.Sprintf(format+"\n", args...))
}

// measure measures for a while, and has that checked. Whatever else the machine,
// or the one below it, does in the midst of a softirq falls to somebody's account:
// so a measurement with which something is wrong is made again. What is wrong with
// each of several is not the machine's fault.
func (l *lab) measure(d time.Duration, check func(delta)) {
	l.t.Helper()
	l.several(func() delta { return l.during(d) }, check)
}

// several is measure for any way to measure.
func (l *lab) several(measure func() delta, check func(delta)) {
	l.t.Helper()
	const most = 4
	for n := 1; ; n++ {
		d, tr := measure(), &trial{TB: l.t}
		d.t = tr
		check(d)
		if len(tr.wrong) == 0 {
			l.t.Log(d)
			return
		}
		l.t.Logf("measurement %d: %s%v", n, strings.Join(tr.wrong, ""), d)
		if n == most {
			l.t.Errorf("none of %d measurements is right", most)
			return
		}
	}
}

// during measures for a while, from a moment on when all generators are at work.
func (l *lab) during(d time.Duration) delta {
	l.t.Helper()
	time.Sleep(300 * time.Millisecond)
	a, err := l.m.Read()
	must(l.t, err)
	time.Sleep(d)
	b, err := l.m.Read()
	must(l.t, err)
	return l.between(a, b)
}

func (l *lab) between(a, b Reading) delta {
	r := delta{l: l, t: l.t, seconds: b.Taken.Sub(a.Taken).Seconds(), softirq: b.Softirq - a.Softirq, thread: b.Thread - a.Thread,
		accounts: make(map[container.ID]Account), thefts: make(map[Theft]time.Duration), readingLost: b.Lost - a.Lost}
	old := make(map[container.ID]Account)
	for _, x := range a.Accounts {
		old[x.Container] = x
	}
	for _, x := range b.Accounts {
		r.accounts[x.Container] = x.since(old[x.Container])
	}
	for _, x := range b.Thefts {
		r.thefts[Theft{Victim: x.Victim, Culprit: x.Culprit}] += x.CPU
	}
	for _, x := range a.Thefts {
		r.thefts[Theft{Victim: x.Victim, Culprit: x.Culprit}] -= x.CPU
	}
	return r
}

// since is what an account has had since an earlier reading of it.
func (a Account) since(b Account) Account {
	for i := range Protocols {
		a.Receive[i].sub(b.Receive[i])
		a.Send[i].sub(b.Send[i])
	}
	a.Own -= b.Own
	a.Took -= b.Took
	a.Robbed -= b.Robbed
	return a
}

func (w *Work) sub(b Work) {
	w.CPU -= b.CPU
	w.Packets -= b.Packets
	w.Bytes -= b.Bytes
}

func (d delta) of(b *sandbox.Box) Account { return d.accounts[d.l.ids[b]] }

func (d delta) system() time.Duration { return d.accounts[System].CPU() }

// here is all that would also be this host's if the world were elsewhere.
func (d delta) here() time.Duration { return d.total() - d.accounts[d.l.outside].CPU() }

func (d delta) total() time.Duration { return d.softirq + d.thread }

// stolen is what a culprit took from a victim's tasks.
func (d delta) stolen(victim, culprit *sandbox.Box) time.Duration {
	return d.thefts[Theft{Victim: Party{Container: d.l.ids[victim], Kind: Task}, Culprit: d.l.ids[culprit]}]
}

func (d delta) String() string {
	var s strings.Builder
	name := map[container.ID]string{System: "system"}
	for b, id := range d.l.ids {
		name[id] = strings.TrimPrefix(b.Name, "acc-")
	}
	fmt.Fprintf(&s, "%.2fs softirq %v thread %v lost %d\n", d.seconds, d.softirq, d.thread, d.readingLost)
	for id, a := range d.accounts {
		fmt.Fprintf(&s, "  %-10s %12v own %12v", name[id], a.CPU(), a.Own)
		for p := range Protocols {
			if w := a.Receive[p]; w.CPU != 0 || w.Packets != 0 {
				fmt.Fprintf(&s, "  rx %v %v %dp %s", p, w.CPU, w.Packets, each(w))
			}
			if w := a.Send[p]; w.CPU != 0 || w.Packets != 0 {
				fmt.Fprintf(&s, "  tx %v %v %dp %s", p, w.CPU, w.Packets, each(w))
			}
		}
		s.WriteByte('\n')
	}
	for t, ns := range d.thefts {
		if ns > time.Millisecond {
			fmt.Fprintf(&s, "  %s from %s %v: %v\n", name[t.Culprit], name[t.Victim.Container], t.Victim.Kind, ns)
		}
	}
	return s.String()
}

func each(w Work) string {
	if w.Packets == 0 {
		return "-"
	}
	return fmt.Sprintf("%dns", int(w.CPU.Nanoseconds())/int(w.Packets))
}

// addsUp checks what must hold of every measurement.
func (d delta) addsUp() {
	d.t.Helper()
	var sum time.Duration
	for _, a := range d.accounts {
		sum += a.CPU()
	}
	near(d.t, "sum of the accounts against softirq and threads", sum, d.total(), 0.02)
	if d.readingLost != 0 {
		d.t.Errorf("%d charges lost", d.readingLost)
	}
	if d.thefts == nil {
		return // the pairs are known to be too few
	}
	for id, a := range d.accounts {
		var took, robbed time.Duration
		for t, ns := range d.thefts {
			if t.Culprit == id && (t.Victim.Kind == Task || t.Victim.Kind == Ksoftirqd) {
				took += ns
			}
			if t.Victim == (Party{Container: id, Kind: Task}) && id != System {
				robbed += ns
			}
		}
		// The pairs are read a moment after the sums.
		if late := d.total() / 50; (a.Took-took).Abs() > late || (a.Robbed-robbed).Abs() > late {
			d.t.Errorf("container %v: took %v and lost %v in all, and by the pairs %v and %v", id, a.Took, a.Robbed, took, robbed)
		}
	}
}

func near(t testing.TB, what string, got, want time.Duration, tolerance float64) {
	t.Helper()
	if diff := float64(got - want); diff > tolerance*float64(want) || -diff > tolerance*float64(want) {
		t.Errorf("%s: %v, want %v within %.0f %%", what, got, want, 100*tolerance)
	}
}

// mostly checks that a part is nearly all of a whole.
func mostly(t testing.TB, what string, part, whole time.Duration, share float64) {
	t.Helper()
	if float64(part) < share*float64(whole) {
		t.Errorf("%s: %v of %v, want at least %.0f %%", what, part, whole, 100*share)
	}
}

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
