package blockio

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/fairlead-project/fairlead/feature/blockio/decide"
)

// capacities holds what disks can do, by block.Disk's Identity, and the file that keeps it
// beyond the agent and the boot.
type capacities struct {
	path string // "": none
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

func loadCapacities(path string) (capacities, error) {
	c := capacities{path: path, of: make(map[string]decide.Capacity)}
	f, err := os.Open(c.path)
	if errors.Is(err, fs.ErrNotExist) { // also without a path
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

// parseCapacities refuses the whole file if one entry is wrong.
func parseCapacities(data []byte) (map[string]decide.Capacity, error) {
	none := make(map[string]decide.Capacity)
	var file capacitiesFile
	if err := json.Unmarshal(data, &file); err != nil {
		return none, err
	}
	if file.Version != capacitiesVersion {
		return none, fmt.Errorf("it is of version %d, and this agent knows version %d", file.Version, capacitiesVersion)
	}
	for id, c := range file.Disks {
		if err := c.Check(); err != nil {
			return none, fmt.Errorf("%q: %w", id, err)
		}
	}
	if file.Disks == nil {
		return none, nil // the file says null
	}
	return file.Disks, nil
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
	if c.path == "" {
		return nil
	}
	data, err := json.MarshalIndent(capacitiesFile{capacitiesVersion, c.of}, "", "  ")
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

// syncFile makes a file whole after a crash.
func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
