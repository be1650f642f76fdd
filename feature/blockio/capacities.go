package blockio

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/policy"
)

// capacities holds what disks can do, by block.Disk's Identity, and the file that keeps it
// beyond the agent and the boot.
type capacities struct {
	file kernel.StateFile
	of   map[string]decide.Capacity
}

// capacitiesFile is the form of the file.
type capacitiesFile struct {
	Version int                        `json:"version"`
	Disks   map[string]decide.Capacity `json:"disks"`
}

const capacitiesVersion = 2

// maxCapacities bounds the file, in bytes.
const maxCapacities = 1 << 20

// loadCapacities refuses the whole file if one entry is wrong.
func loadCapacities(path string) (capacities, error) {
	c := capacities{file: kernel.StateFile{Path: path, Most: maxCapacities, Durable: true}, of: make(map[string]decide.Capacity)}
	var in capacitiesFile
	if found, err := c.file.Read(&in); err != nil || !found {
		return c, err
	}
	if in.Version != capacitiesVersion {
		return c, fmt.Errorf("read %s: it is of version %d, and this agent knows version %d", path, in.Version, capacitiesVersion)
	}
	for id, of := range in.Disks {
		if err := of.Check(); err != nil {
			return c, fmt.Errorf("read %s: %q: %w", path, id, err)
		}
	}
	if in.Disks != nil {
		c.of = in.Disks
	}
	return c, nil
}

// set records what a disk can do. If the file cannot be written, nothing changes.
func (c *capacities) set(id string, of decide.Capacity) error {
	was, had := c.of[id]
	c.of[id] = of
	err := c.save()
	if err != nil {
		if delete(c.of, id); had {
			c.of[id] = was
		}
	}
	return err
}

func (c *capacities) save() error {
	if err := os.MkdirAll(filepath.Dir(c.file.Path), 0o755); err != nil {
		return err
	}
	return c.file.Write(capacitiesFile{capacitiesVersion, c.of})
}

// Guarantees implements feature.Guarantor: reads and writes per second of the disks that the
// operator named, if their capacity is known. Reads and writes share that, and whoever counts them
// counts each by itself: so reads are offered one half of what can be reserved, and writes the
// other.
func (f *BlockIO) Guarantees() (map[string]uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make(map[string]uint64)
	var errs []error
	for name, device := range f.cfg.Disks {
		d, err := block.Open(f.cfg.Roots.Sys, device)
		if err != nil {
			errs = append(errs, fmt.Errorf("disk %s: %w", name, err)) // it has vanished, or has not come yet
			continue
		}
		half, known := f.capacity(d).Halves()
		if !known {
			errs = append(errs, fmt.Errorf("disk %s: its capacity is not known", name))
			continue
		}
		reads, writes := policy.DiskResources(name)
		all[reads], all[writes] = half.ReadIOPS, half.WriteIOPS
	}
	return all, errors.Join(errs...)
}

// profiled returns the budget that reservations need together, by the profiles of their disks.
func (f *BlockIO) profiled(reserved []reservation) (sum time.Duration, err error) {
	if len(reserved) == 0 {
		return 0, errors.New("auto: the container has reserved nothing (io.reserve)")
	}
	for _, r := range reserved {
		p := f.capacity(r.disk).Realtime
		if len(p) == 0 {
			return 0, fmt.Errorf("auto: %[1]s has no profile: measure it with `fairlead io calibrate %[1]s --scratch DIR --realtime`", r.device)
		}
		budget, err := p.Needs(r.figures)
		if err != nil {
			return 0, fmt.Errorf("auto: %s: %w", r.device, err)
		}
		sum += budget
	}
	return max(sum, time.Millisecond), nil
}

// reprofile updates the budgets of containers with io.realtime: auto after a new profile. A
// container that cannot have the new one keeps its budget until the next Apply, which reports why.
func (f *BlockIO) reprofile() error {
	var errs []error
	for _, m := range f.managed {
		if m.budget > 0 && m.target.Settings.RealtimeAuto {
			errs = append(errs, f.grant(m))
		}
	}
	errs = append(errs, f.realtime())
	f.promote()
	return errors.Join(errs...)
}
