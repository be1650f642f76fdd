package rig

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/load"
)

//go:generate go tool bpf2go -target bpfel -cc $BPF2GO_CC -strip $BPF2GO_STRIP -no-global-types queue queue.bpf.c -- -O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -target bpfel -cc $BPF2GO_CC -strip $BPF2GO_STRIP -no-global-types stopwatch stopwatch.bpf.c -- -O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -target bpfel -cc $BPF2GO_CC -strip $BPF2GO_STRIP -no-global-types -type stamp tap tap.bpf.c -- -O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu

// probe holds attached BPF programs of the rig.
type probe struct {
	object *bpf.Object
	links  bpf.Links
}

// open loads the maps and variables of a probe into objs, and attaches the named programs.
func (p *probe) open(name string, read func() (*ebpf.CollectionSpec, error), vars bpf.Vars, objs any, programs ...string) (err error) {
	if p.object, err = bpf.Open(name, read, vars, nil); err == nil {
		err = p.object.Load(objs, nil)
	}
	if err == nil {
		p.links, err = p.object.Attach(programs...)
	}
	if err != nil {
		err = errors.Join(fmt.Errorf("open %s: %w", name, err), p.Close())
		*p = probe{}
	}
	return err
}

// Close removes the programs.
func (p *probe) Close() error { return errors.Join(p.links.Close(), p.object.Close()) }

// nic returns the inode of the NIC's network namespace and its index, by which programs identify it.
func (r *Rig) nic() (netns, index uint32, err error) {
	ns, err := netdev.Open(r.Node.NetNS())
	if err != nil {
		return 0, 0, err
	}
	defer ns.Close()
	i, err := ns.Index(NICDevice)
	return uint32(ns.Inode()), uint32(i), err
}

// Queue measures how long packets of one length wait at the queue of the NIC.
type Queue struct {
	probe
	objs struct {
		Waited *ebpf.Map      `ebpf:"fl_waited"`
		Lost   *ebpf.Variable `ebpf:"fl_lost"`
	}
}

// Queue starts to measure packets that leave by the NIC and have this length in bytes, with the link
// header. It measures from the hand-over to the root qdisc, of any kind, to the hand-over to the driver.
// It costs every packet of the machine some 10 ns. The caller closes it.
func (r *Rig) Queue(length int) (*Queue, error) {
	netns, index, err := r.nic()
	if err != nil {
		return nil, err
	}
	q := new(Queue)
	vars := bpf.Vars{queueVarFlNetns: netns, queueVarFlIfindex: index, queueVarFlLength: uint32(length)}
	return q, q.open("queue", loadQueue, vars, &q.objs, queueProgFlSent, queueProgFlQueued)
}

// Waits holds the delays of packets since the start, and the number of missed packets.
type Waits struct {
	*hist.Histogram
	Missed uint64
}

// Read reads the delays.
func (q *Queue) Read() (Waits, error) {
	w := Waits{Histogram: load.NewHistogram()}
	err := q.objs.Lost.Get(&w.Missed)
	for i := range w.Counts {
		if err == nil {
			err = q.objs.Waited.Lookup(uint32(i), &w.Counts[i])
		}
	}
	if err != nil {
		return w, fmt.Errorf("read the queue's delays: %w", err)
	}
	return w, nil
}

// Tap records when packets of one UDP port leave and enter by the NIC.
type Tap struct {
	probe
	objs struct {
		Stamps *ebpf.Map      `ebpf:"fl_stamps"`
		Taken  *ebpf.Variable `ebpf:"fl_taken"`
	}
}

// Trip is one request and its reply, in times of the monotonic clock.
type Trip struct{ Asked, Answered time.Duration }

// Tap starts to record requests to a port outside, and their replies. Only one request may be under way
// at a time. The caller closes the Tap.
func (r *Rig) Tap(port uint16) (*Tap, error) {
	netns, index, err := r.nic()
	if err != nil {
		return nil, err
	}
	t := new(Tap)
	vars := bpf.Vars{tapVarFlNetns: netns, tapVarFlIfindex: index, tapVarFlPort: port}
	return t, t.open("tap", loadTap, vars, &t.objs, tapProgFlIn, tapProgFlOut)
}

// Trips returns the answered requests in order. A request that was sent again counts from the last time
// that it was sent.
func (t *Tap) Trips() (trips []Trip, err error) {
	var taken uint32
	if err := t.objs.Taken.Get(&taken); err != nil {
		return nil, fmt.Errorf("read stamps: %w", err)
	}
	var asked time.Duration
	for i := range taken {
		var s tapStamp
		if err := t.objs.Stamps.Lookup(i, &s); err != nil {
			return nil, fmt.Errorf("read stamps: %w", err)
		}
		switch at := time.Duration(s.At); {
		case s.Out != 0:
			asked = at
		case asked != 0:
			trips = append(trips, Trip{asked, at})
			asked = 0
		}
	}
	return trips, nil
}

// Stopwatch measures network softirqs with separate programs. The programs of a tracepoint run in the
// order in which they were attached. A stopwatch that is created before the accounts' programs and
// started after them measures the work between them, without their own time. A stopwatch that is
// created and started before them begins and ends a moment earlier than they do, so it measures the
// same time as they do.
type Stopwatch struct {
	probe
	objs struct {
		Stints *ebpf.Map `ebpf:"fl_stints"`
	}
}

// NewStopwatch creates a stopped stopwatch. The caller closes it.
func NewStopwatch() (*Stopwatch, error) {
	w := new(Stopwatch)
	return w, w.open("stopwatch", loadStopwatch, nil, &w.objs, stopwatchProgFlSoftirqEnd)
}

// Start starts the stopwatch.
func (w *Stopwatch) Start() error {
	links, err := w.object.Attach(stopwatchProgFlSoftirq)
	w.links = append(w.links, links...)
	if err != nil {
		return fmt.Errorf("start stopwatch: %w", err)
	}
	return nil
}

// Read returns the time of NET_TX and NET_RX since the start, on all CPUs and on each.
func (w *Stopwatch) Read() (sum time.Duration, byCPU []time.Duration, err error) {
	var send, receive []struct{ Sum, Began uint64 }
	if err := errors.Join(w.objs.Stints.Lookup(uint32(2), &send), w.objs.Stints.Lookup(uint32(3), &receive)); err != nil { // include/linux/interrupt.h
		return 0, nil, fmt.Errorf("read stopwatch: %w", err)
	}
	for cpu := range send {
		byCPU = append(byCPU, time.Duration(send[cpu].Sum+receive[cpu].Sum))
		sum += byCPU[cpu]
	}
	return sum, byCPU, nil
}

// Drop starts or stops dropping all packets from outside, by XDP at the NIC of the path NIC. A real
// NIC is polled on the CPU of its interrupt, but this veth and its XDP program run on the sender's CPU.
// So the drop costs the containers' CPU nothing, like a drop in hardware.
func (r *Rig) Drop(on bool) error {
	if on == r.dropping {
		return nil
	}
	program := -1 // detaches
	if on {
		const drop = 1 // XDP_DROP
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "fl_rig_drop", Type: ebpf.XDP, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, drop), asm.Return()},
		})
		if err != nil {
			return err
		}
		defer p.Close() // the device keeps the program
		program = p.FD()
	}
	err := r.Node.Do(func() error {
		nic, err := netlink.LinkByName(NICDevice)
		if err != nil {
			return err
		}
		return netlink.LinkSetXdpFdWithFlags(nic, program, nl.XDP_FLAGS_DRV_MODE)
	})
	if err != nil {
		return fmt.Errorf("drop what comes by %s: %w", NICDevice, err)
	}
	r.dropping = on
	return nil
}

// Ftrace records tracepoints with the kernel's own tracer, as trace-cmd does. It uses a separate
// instance, and reads and discards the instance's buffers.
type Ftrace struct {
	fs   *os.File // tracefs, mounted nowhere
	dir  string   // of the instance
	stop chan struct{}
	done chan struct{}
	read uint64 // bytes
}

// ftracePrefix begins the names of all instances.
const ftracePrefix = "fairlead-"

// NewFtrace begins to record events, such as net/net_dev_queue. It returns an error for an event
// that this kernel does not have. The caller closes it.
func NewFtrace(events ...string) (_ *Ftrace, err error) {
	fs, err := openTracefs()
	if err != nil {
		return nil, fmt.Errorf("record by ftrace: %w", err)
	}
	f := &Ftrace{fs: fs, dir: filepath.Join(instances(fs), ftracePrefix+strconv.Itoa(os.Getpid())), stop: make(chan struct{}), done: make(chan struct{})}
	if err := os.Mkdir(f.dir, 0o700); err != nil {
		return nil, errors.Join(fmt.Errorf("record by ftrace: %w", err), fs.Close())
	}
	for _, event := range events {
		if err := os.WriteFile(filepath.Join(f.dir, "events", event, "enable"), []byte("1"), 0); err != nil {
			return nil, errors.Join(fmt.Errorf("record by ftrace: %w", err), f.remove())
		}
	}
	go f.discard()
	return f, nil
}

// openTracefs returns a tracefs that is mounted nowhere on the host. Its name is a path to it.
func openTracefs() (*os.File, error) {
	fs, err := unix.Fsopen("tracefs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open tracefs: %w", err)
	}
	defer unix.Close(fs)
	at := -1
	if err = unix.FsconfigCreate(fs); err == nil {
		at, err = unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open tracefs: %w", err)
	}
	return os.NewFile(uintptr(at), fmt.Sprintf("/proc/self/fd/%d", at)), nil
}

func instances(fs *os.File) string { return filepath.Join(fs.Name(), "instances") }

// discard reads the recording until stop is closed. It does not wait for events, because a wakeup for
// each event would disturb the measurement.
func (f *Ftrace) discard() {
	defer close(f.done)
	var cpus []int
	for {
		pipe := filepath.Join(f.dir, "per_cpu", fmt.Sprintf("cpu%d", len(cpus)), "trace_pipe_raw")
		fd, err := unix.Open(pipe, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			break // no more CPUs
		}
		defer unix.Close(fd)
		cpus = append(cpus, fd)
	}
	const most = 256 // pages of a CPU at a time
	page := make([]byte, os.Getpagesize())
	for ended := false; !ended; {
		select {
		case <-f.stop:
			ended = true
		case <-time.After(10 * time.Millisecond):
		}
		for _, fd := range cpus {
			for range most {
				n, err := unix.Read(fd, page)
				if err != nil || n <= 0 {
					break
				}
				f.read += uint64(n)
			}
		}
	}
}

func (f *Ftrace) remove() error { return errors.Join(unix.Rmdir(f.dir), f.fs.Close()) }

// Close ends the recording, and returns its size in bytes.
func (f *Ftrace) Close() (read uint64, err error) {
	close(f.stop)
	<-f.done
	if err := f.remove(); err != nil {
		return f.read, fmt.Errorf("end ftrace: %w", err)
	}
	return f.read, nil
}

// sweepFtrace removes the instances of killed processes.
func sweepFtrace() error {
	fs, err := openTracefs()
	if err != nil {
		return nil // no tracefs, no instances
	}
	defer fs.Close()
	left, _ := filepath.Glob(filepath.Join(instances(fs), ftracePrefix+"*"))
	var errs []error
	for _, dir := range left {
		_, pid, _ := strings.Cut(filepath.Base(dir), ftracePrefix)
		if n, err := strconv.Atoi(pid); err == nil && unix.Kill(n, 0) == unix.ESRCH {
			errs = append(errs, unix.Rmdir(dir))
		}
	}
	return errors.Join(errs...)
}
