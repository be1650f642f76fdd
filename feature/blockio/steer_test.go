package blockio

import (
	"errors"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Work that follows an interrupt which nobody can move is done by other CPUs: by those that
// the receive queue hands it to, or by the thread that polls. What somebody else has set
// stays, and is said.
func TestSteer(t *testing.T) {
	h := newHost(t)
	ns, far := testkit.NetNS(t), testkit.NetNS(t)
	const dev = "flsteer0"
	testkit.Veth(t, ns, dev, far, "flsteer1")
	var err error
	h.net, err = netdev.Open(ns.Path)
	must(t, err)
	index, err := h.net.Index(dev)
	must(t, err)
	by := journal.Owner{Feature: name}
	turn := func(k journal.Knob, value string) error { return h.journal.TurnUntil(k, value, by, time.Time{}) }
	steer := func() string {
		t.Helper()
		left, err := h.steer(dev, []int{1}, turn)
		must(t, err)
		if left == nil {
			return ""
		}
		return left.Error()
	}
	value := func(k journal.Knob) string {
		t.Helper()
		v, err := k.Read()
		must(t, err)
		return v
	}
	restored := func(k journal.Knob) {
		t.Helper()
		// No process is in that namespace, by which kernel.Opener would find it.
		_, err := h.journal.Restore(func(journal.Ref) (journal.Knob, error) { return k, nil }, func(e journal.Entry) bool { return e.Ref == k.Ref() })
		must(t, err)
	}

	rps := h.net.RPS(index, 0)
	before := value(rps)
	if left := steer(); left != "" || value(rps) != netdev.CPUMask([]int{1}, before) {
		t.Errorf("rps_cpus %q, was %q; left: %q", value(rps), before, left)
	}
	if left := steer(); left != "" || len(h.journal.Entries()) != 1 {
		t.Errorf("again: left %q, %+v", left, h.journal.Entries())
	}
	if runtime.NumCPU() > 1 {
		ns.Address(t, dev, "10.93.0.1/24")
		far.Address(t, "flsteer1", "10.93.0.2/24")
		was, got := received(t, 1), uint64(0)
		must(t, far.Do(func() error { return sendFrom(0, "10.93.0.1:9", 100) }))
		for end := time.Now().Add(10 * time.Second); got < 100 && time.Now().Before(end); time.Sleep(time.Millisecond) {
			got = received(t, 1) - was
		}
		if got < 100 {
			t.Errorf("CPU 1 received %d of 100 packets that CPU 0 had sent", got)
		}
	}
	restored(rps)
	if value(rps) != before {
		t.Errorf("rps_cpus %q, was %q", value(rps), before)
	}
	theirs := netdev.CPUMask([]int{0}, before)
	must(t, rps.Write(theirs))
	if left := steer(); !strings.Contains(left, "queue 0 of "+dev) || value(rps) != theirs || len(h.journal.Entries()) != 0 {
		t.Errorf("rps_cpus %q of somebody else, was %q; left: %q", value(rps), theirs, left)
	}

	// Another's thread of the same name is not this device's.
	stranger := testkit.NetNS(t)
	testkit.Veth(t, stranger, dev, far, "flsteer2")
	theirNS, err := netdev.Open(stranger.Path)
	must(t, err)
	t.Cleanup(func() { must(t, theirNS.Close()) })
	theirIndex, err := theirNS.Index(dev)
	must(t, err)
	must(t, errors.Join(theirNS.Offload(theirIndex, netdev.GRO).Write(netdev.GRO.On()), theirNS.Threaded(theirIndex).Write("1")))
	must(t, rps.Write(before))
	if left := steer(); left != "" || value(rps) != netdev.CPUMask([]int{1}, before) {
		t.Errorf("beside a thread of another's: rps_cpus %q; left: %q", value(rps), left)
	}
	// What an administrator sets after us stays.
	must(t, rps.Write(theirs))
	if left := steer(); !strings.Contains(left, "queue 0 of "+dev) || value(rps) != theirs {
		t.Errorf("rps_cpus %q, and somebody has set %q since; left: %q", value(rps), theirs, left)
	}

	must(t, errors.Join(h.net.Offload(index, netdev.GRO).Write(netdev.GRO.On()), h.net.Threaded(index).Write("1")))
	threads, err := h.pollers(index)
	must(t, err)
	if len(threads) == 0 {
		t.Fatal("the device has no thread")
	}
	cpus := sched.Affinity("/proc", threads[0])
	before = value(cpus)
	if left := steer(); left != "" || value(cpus) != "1" || value(rps) != theirs {
		t.Errorf("CPUs of the thread %q, were %q; rps_cpus %q; left: %q", value(cpus), before, value(rps), left)
	}
	restored(cpus)
	if value(cpus) != before {
		t.Errorf("CPUs of the thread %q, were %q", value(cpus), before)
	}
	other := journal.Owner{Feature: "netcpu"}
	must(t, h.journal.Turn(cpus, "0", other))
	if left := steer(); !strings.Contains(left, "somebody else") || value(cpus) != "0" {
		t.Errorf("CPUs of a thread that another feature has placed: %q; left: %q", value(cpus), left)
	}
	restored(cpus)
}

// received counts the packets that a CPU has received, from any device.
func received(t *testing.T, cpu int) uint64 {
	t.Helper()
	text, err := os.ReadFile("/proc/net/softnet_stat")
	must(t, err)
	first, _, _ := strings.Cut(strings.Split(string(text), "\n")[cpu], " ")
	n, err := strconv.ParseUint(first, 16, 64)
	must(t, err)
	return n
}

// sendFrom sends datagrams to an address, all by one CPU.
func sendFrom(cpu int, to string, count int) error {
	var before, set unix.CPUSet
	set.Set(cpu)
	if err := errors.Join(unix.SchedGetaffinity(0, &before), unix.SchedSetaffinity(0, &set)); err != nil {
		return err
	}
	defer unix.SchedSetaffinity(0, &before)
	conn, err := net.Dial("udp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	for range count {
		// Refused: nobody listens there, and the last one was answered.
		if _, err := conn.Write([]byte("x")); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
	}
	return nil
}
