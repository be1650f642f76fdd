package blockio

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel"
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
