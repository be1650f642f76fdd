package blockio

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// capacities are what disks can do, by block.Disk's Identity, and the file in which
// they outlive the agent and the boot.
type capacities struct {
	path string // "": none
	of   map[string]Capacity
}

// maxCapacities bounds the file, in bytes.
const maxCapacities = 1 << 20

func loadCapacities(path string) (capacities, error) {
	c := capacities{path: path, of: make(map[string]Capacity)}
	if path == "" {
		return c, nil
	}
	f, err := os.Open(c.path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return c, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxCapacities))
	if err == nil {
		c.of, err = parseCapacities(data)
	}
	if err != nil {
		return c, fmt.Errorf("read %s: %w", c.path, err)
	}
	return c, nil
}

// parseCapacities refuses the whole of what is not all in order.
func parseCapacities(data []byte) (map[string]Capacity, error) {
	of := make(map[string]Capacity)
	if err := json.Unmarshal(data, &of); err != nil {
		return make(map[string]Capacity), err
	}
	for id, c := range of {
		if err := c.check(); err != nil {
			return make(map[string]Capacity), fmt.Errorf("%q: %w", id, err)
		}
	}
	if of == nil {
		of = make(map[string]Capacity) // the file says null
	}
	return of, nil
}

// set notes what a disk can do, in the file first.
func (c *capacities) set(id string, of Capacity) error {
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
	if c.path == "" {
		return nil
	}
	data, err := json.MarshalIndent(c.of, "", "  ")
	if err != nil {
		return err
	}
	if len(data) > maxCapacities {
		return fmt.Errorf("write %s: more than %d bytes", c.path, maxCapacities)
	}
	if err := os.MkdirAll(filepath.Dir(c.path), 0o755); err != nil {
		return err
	}
	next := c.path + ".next"
	if err := errors.Join(os.WriteFile(next, append(data, '\n'), 0o600), syncFile(next)); err != nil {
		os.Remove(next)
		return err
	}
	return os.Rename(next, c.path)
}

// syncFile sees to it that a file is whole after a crash.
func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
