package rig

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// ProgramSet is a set of BPF programs, by their ids.
type ProgramSet map[ebpf.ProgramID]bool

// Programs returns all BPF programs that the kernel has now, whoever loaded them, except the ones
// in without.
func Programs(without ProgramSet) (ProgramSet, error) {
	all := make(ProgramSet)
	for id := ebpf.ProgramID(0); ; {
		next, err := ebpf.ProgramGetNextID(id)
		if errors.Is(err, unix.ENOENT) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list BPF programs: %w", err)
		}
		if id = next; !without[id] {
			all[id] = true
		}
	}
}

// Runs is how often BPF programs ran, and for how long by the kernel's run-time statistics
// (kernel.bpf_stats_enabled).
type Runs struct {
	By map[string]Run // by the programs' names
	// Idle is the statistics' time for a run of a program that does nothing: their own overhead per
	// run.
	Idle time.Duration
}

// Run is the runs of all programs with one name.
type Run struct {
	Count uint64
	Time  time.Duration // with the statistics' overhead
}

// Count returns the number of runs.
func (r Runs) Count() (n uint64) {
	for _, run := range r.By {
		n += run.Count
	}
	return n
}

// Time returns how long all runs took, with the statistics' overhead.
func (r Runs) Time() (sum time.Duration) {
	for _, run := range r.By {
		sum += run.Time
	}
	return sum
}

// Net is Time without the statistics' overhead.
func (r Runs) Net() time.Duration { return r.Time() - time.Duration(r.Count())*r.Idle }

// CountRuns enables the kernel's statistics and counts the runs of some programs while during runs.
// Meanwhile all BPF programs of the machine pay for the statistics, and each packet for a program
// that does nothing. CountRuns leaves out programs that are unloaded meanwhile. It returns an error
// if no packet came.
func CountRuns(of ProgramSet, during func() error) (_ Runs, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("count the runs of BPF programs: %w", err)
		}
	}()
	var open []io.Closer
	defer func() {
		for _, c := range open {
			err = errors.Join(err, c.Close())
		}
	}()
	idle, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "fl_idle", Type: ebpf.Tracing, AttachType: ebpf.AttachTraceRawTp, AttachTo: "netif_receive_skb", License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		return Runs{}, err
	}
	open = append(open, idle)
	attached, err := link.AttachTracing(link.TracingOptions{Program: idle})
	if err != nil {
		return Runs{}, err
	}
	open = append(open, attached)
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return Runs{}, err
	}
	open = append(open, stats)

	before, err := read(of)
	if err != nil {
		return Runs{}, err
	}
	nothing, err := idle.Stats()
	if err != nil {
		return Runs{}, err
	}
	if err := during(); err != nil {
		return Runs{}, err
	}
	after, err := read(of)
	if err != nil {
		return Runs{}, err
	}
	something, err := idle.Stats()
	if err != nil {
		return Runs{}, err
	}
	n := something.RunCount - nothing.RunCount
	if n == 0 {
		return Runs{}, errors.New("no packet came")
	}
	r := Runs{By: make(map[string]Run), Idle: (something.Runtime - nothing.Runtime) / time.Duration(n)}
	for id, a := range after {
		b, ok := before[id]
		if !ok {
			continue
		}
		run := r.By[a.name]
		run.Count, run.Time = run.Count+a.Count-b.Count, run.Time+a.Time-b.Time
		r.By[a.name] = run
	}
	return r, nil
}

// ran is the runs of one program so far.
type ran struct {
	name string
	Run
}

func read(of ProgramSet) (map[ebpf.ProgramID]ran, error) {
	all := make(map[ebpf.ProgramID]ran)
	for id := range of {
		p, err := ebpf.NewProgramFromID(id)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, err
		}
		info, err := p.Info()
		stats, serr := p.Stats()
		if err := errors.Join(err, serr, p.Close()); err != nil {
			return nil, err
		}
		all[id] = ran{name: info.Name, Run: Run{Count: stats.RunCount, Time: stats.Runtime}}
	}
	return all, nil
}
