package latency

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// BenchmarkLadder measures the price of the measurement part by part, from outside: ns for a
// packet that arrives in a flood, for a round trip without a pause (mean), and for one of a thousand
// a second (median). Each rung of empty programs has those of the rungs before it. The rungs take
// many short turns, each beside nothing; a figure is the median of the differences, with quartiles.
//
//	go test -run - -bench Ladder -benchtime 1x ./feature/latency
func BenchmarkLadder(b *testing.B) {
	for _, path := range []string{"local", "nic"} {
		for _, of := range []string{"flood", "trips", "seldom"} {
			b.Run(path+"/"+of, func(b *testing.B) {
				h := newHost(b)
				h.climb(path, of, 40, 80*time.Millisecond, h.rungs)
			})
		}
	}
}

// rung is what is attached in one step. attach returns what detaches it.
type rung struct {
	name   string
	attach func() func()
}

// nothing is what chance makes of it.
func nothing() rung { return rung{"0nothing", func() func() { return func() {} }} }

// climb measures rungs while one container has a load with a peer. of receives the ends of another
// container, and those of the one.
func (h *host) climb(path, load string, rounds int, take time.Duration, of func(m *meter, others, own *ends) []rung) {
	b := h.T.(*testing.B)
	h.bridge()
	one, c := h.add("one", "10.66.0.2/24", h.ns)
	two, _ := h.add("two", "10.66.0.3/24", h.ns)
	_, other := h.add("other", "10.66.0.4/24", h.ns)
	peer, to := two, "10.66.0.3:9000"
	if path == "nic" {
		peer, to = h.wire, "10.66.0.1:9000"
	}
	costs := h.costs(one, peer, to, load, take)
	h.measure(true, c, other)
	f := h.f
	f.mu.Lock()
	f.cfg.Budget = DefaultBudget
	close(f.stop) // the rungs attach and detach the programs
	f.stop = make(chan struct{})
	without := func(c container.Container) *ends {
		key := f.tenants.Of(c.ID).Key()
		kept := f.measured[key]
		delete(f.measured, key)
		e, err := f.ends()
		must(b, err)
		f.measured[key] = kept
		return e
	}
	others, own := without(c), without(other)
	must(b, f.meter.rest())
	f.mu.Unlock()
	rungs := of(f.meter, others, own)
	above := make([][]float64, len(rungs))
	for range rounds {
		for i, r := range rungs {
			base := costs()
			detach := r.attach()
			above[i] = append(above[i], costs()-base)
			detach()
		}
	}
	for i, r := range rungs {
		slices.Sort(above[i])
		for name, at := range map[string]int{"": rounds / 2, "-q1": rounds / 4, "-q3": rounds - 1 - rounds/4} {
			b.ReportMetric(above[i][at], r.name+name)
		}
	}
	b.ReportMetric(costs(), "alone")
	b.ReportMetric(0, "ns/op")
}

// costs starts a load, and returns what measures it: ns.
func (h *host) costs(client, server *sandbox.Box, to, of string, take time.Duration) func() float64 {
	rate := func(board *load.Board) float64 {
		time.Sleep(20 * time.Millisecond)
		before := board.Read()
		time.Sleep(take)
		return board.Read().Since(before).Rate()
	}
	if of == "flood" {
		received, _ := h.Load(server, []int{0}, "udp-recv", "--listen", to)
		h.Load(client, []int{1}, "udp-send", "--to", to, "--size", "64")
		return func() float64 { return 1e9 / rate(received) }
	}
	h.Load(server, []int{0}, "rr-server", "--proto", "udp", "--listen", to)
	if of == "trips" {
		asked, _ := h.Load(client, []int{1}, "rr-client", "--proto", "udp", "--to", to, "--conns", "1", "--size", "64")
		return func() float64 { return 1e9 / rate(asked) }
	}
	addr := netip.MustParseAddrPort(to)
	var fd int
	must(h.T, client.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Connect(fd, &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()})
	}))
	h.T.Cleanup(func() { unix.Close(fd) })
	sleep, err := keepAwake()
	must(h.T, err)
	h.T.Cleanup(sleep)
	return func() float64 {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var before, last unix.CPUSet
		must(h.T, unix.SchedGetaffinity(0, &before))
		last.Set(1)
		must(h.T, unix.SchedSetaffinity(0, &last))
		var trips []time.Duration
		buf := make([]byte, 64)
		for end := time.Now().Add(take); time.Now().Before(end); {
			pause := unix.NsecToTimespec(int64(time.Millisecond))
			unix.Nanosleep(&pause, nil)
			began := time.Now()
			_, err := unix.Write(fd, buf)
			must(h.T, err)
			_, err = unix.Read(fd, buf)
			must(h.T, err)
			trips = append(trips, time.Since(began))
		}
		must(h.T, unix.SchedSetaffinity(0, &before))
		slices.Sort(trips)
		return float64(trips[len(trips)/2])
	}
}

// rungs returns the steps from empty programs to the measurement of the load's own container.
func (h *host) rungs(m *meter, others, own *ends) []rung {
	all := []rung{nothing()}
	hooks := []string{latencyProgFlQueue, latencyProgFlXmit, latencyProgFlReceive, latencyProgFlPoll, latencyProgFlBacklog}
	for i, name := range []string{"1queue", "2xmit", "3receive", "4poll", "5backlog"} {
		all = append(all, rung{name, func() func() { return empty(h.T, hooks[:i+1]...) }})
	}
	nobody := *others
	nobody.near = [len(nobody.near)]uint16{}
	for _, r := range []struct {
		name string
		e    *ends
	}{{"6nobody", &nobody}, {"7others", others}, {"8own", own}} {
		all = append(all, rung{r.name, func() func() {
			must(h.T, m.follow(r.e, DefaultBudget))
			must(h.T, m.resume())
			return func() { must(h.T, m.rest()) }
		}})
	}
	return append(all, rung{"9turn", func() func() { // attached and detached once in a measurement
		must(h.T, m.follow(own, DefaultBudget))
		done := make(chan error)
		time.AfterFunc(60*time.Millisecond, func() { done <- errors.Join(m.resume(), m.rest()) })
		return func() { must(h.T, <-done) }
	}})
}

// empty attaches programs that do nothing in place of ours.
func empty(b testing.TB, names ...string) func() {
	spec, err := loadLatency()
	must(b, err)
	var links bpf.Links
	for _, name := range names {
		s := spec.Programs[name]
		s.Instructions = asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}
		p, err := ebpf.NewProgram(s)
		must(b, err)
		l, err := bpf.Attach(p)
		must(b, err)
		must(b, p.Close())
		links = append(links, l...)
	}
	return func() { must(b, links.Close()) }
}

// keepAwake keeps every CPU from idling until stop, by threads that give way to all others at once
// (SCHED_IDLE): an idle CPU needs some microseconds to wake up, and on a virtual machine often far
// longer.
func keepAwake() (stop func(), err error) {
	var done atomic.Bool
	var all sync.WaitGroup
	stop = func() { done.Store(true); all.Wait() }
	started := make(chan error)
	for range runtime.NumCPU() {
		all.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread ends with its policy
			err := unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_IDLE}, 0)
			started <- err
			for err == nil && !done.Load() {
			}
		})
		if err := <-started; err != nil {
			stop()
			return nil, fmt.Errorf("keep CPUs awake: %w", err)
		}
	}
	return stop, nil
}
