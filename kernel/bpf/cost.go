package bpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// prefix starts the name of each program of fairlead.
const prefix = "fl_"

// Cost is the cost of all loaded programs of one name in a window.
type Cost struct {
	Program string        `json:"program"`
	Copies  int           `json:"copies"`
	Runs    uint64        `json:"runs"`
	Time    time.Duration `json:"nanoseconds"`
}

// Costs makes the kernel measure the runs of all programs for a window (BPF_ENABLE_STATS), and
// returns the costs of fairlead's, the largest first. During the window each run of any program
// reads the clock twice more. It needs CAP_SYS_ADMIN.
func Costs(ctx context.Context, window time.Duration) ([]Cost, error) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("time BPF programs: %w", err)
	}
	defer stats.Close()
	before, err := runs()
	if err != nil {
		return nil, err
	}
	select {
	case <-time.After(window):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	after, err := runs()
	if err != nil {
		return nil, err
	}
	var list []Cost
	for id, now := range after { // a program loaded during the window began at 0
		i := slices.IndexFunc(list, func(c Cost) bool { return c.Program == now.Program })
		if i < 0 {
			i, list = len(list), append(list, Cost{Program: now.Program})
		}
		list[i].Copies++
		list[i].Runs += now.Runs - before[id].Runs
		list[i].Time += now.Time - before[id].Time
	}
	slices.SortFunc(list, func(a, b Cost) int {
		return cmp.Or(cmp.Compare(b.Time, a.Time), strings.Compare(a.Program, b.Program))
	})
	return list, nil
}

// runs reads the total cost of each program of fairlead.
func runs() (map[ebpf.ProgramID]Cost, error) {
	all := make(map[ebpf.ProgramID]Cost)
	id := ebpf.ProgramID(0)
	for {
		next, err := ebpf.ProgramGetNextID(id)
		if errors.Is(err, os.ErrNotExist) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("list BPF programs: %w", err)
		}
		id = next
		c, err := ran(id)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // it has ended since
			return nil, fmt.Errorf("read BPF program %d: %w", id, err)
		}
		if err == nil && strings.HasPrefix(c.Program, prefix) {
			all[id] = c
		}
	}
}

func ran(id ebpf.ProgramID) (c Cost, err error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return c, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return c, err
	}
	s, err := p.Stats()
	if err != nil {
		return c, err
	}
	return Cost{Program: info.Name, Runs: s.RunCount, Time: s.Runtime}, nil
}
