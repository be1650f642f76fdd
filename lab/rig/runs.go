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
// (kernel.bpf_stats_enabled), without the statistics' own time.
type Runs struct {
	Count uint64
	Time  time.Duration
}

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
	var r Runs
	for id, a := range after {
		if b, ok := before[id]; ok {
			r.Count, r.Time = r.Count+a.Count-b.Count, r.Time+a.Time-b.Time
		}
	}
	idling := (something.Runtime - nothing.Runtime) / time.Duration(n) // the statistics' time for a run that does nothing
	r.Time -= time.Duration(r.Count) * idling
	return r, nil
}

func read(of ProgramSet) (map[ebpf.ProgramID]Runs, error) {
	all := make(map[ebpf.ProgramID]Runs)
	for id := range of {
		p, err := ebpf.NewProgramFromID(id)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, err
		}
		stats, err := p.Stats()
		if err := errors.Join(err, p.Close()); err != nil {
			return nil, err
		}
		all[id] = Runs{Count: stats.RunCount, Time: stats.Runtime}
	}
	return all, nil
}
