package blockio

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel/block"
)

// capacities holds what disks can do, by block.Disk's Identity, and the file that keeps it
// beyond the agent and the boot.
type capacities struct {
	path string // "": none
	of   map[string]decide.Capacity
}

// capacitiesFile is the form of the file. Version 1 was only the map of Disks, by former
// identity.
type capacitiesFile struct {
	Version int                        `json:"version"`
	Disks   map[string]decide.Capacity `json:"disks"`
}

const capacitiesVersion = 2

// maxCapacities bounds the file, in bytes.
const maxCapacities = 1 << 20

// loadCapacities reads the file. In one of an earlier release, a disk of this host keeps its
// entry if the entry cannot be another disk's.
func loadCapacities(path, sys string) (capacities, error) {
	c := capacities{path: path, of: make(map[string]decide.Capacity)}
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
	var former bool
	if err == nil {
		c.of, former, err = parseCapacities(data)
	}
	if err == nil && former {
		var disks []block.Disk
		if disks, err = block.Disks(sys); err == nil {
			err = c.rename(disks)
		}
	}
	if err != nil {
		return c, fmt.Errorf("read %s: %w", c.path, err)
	}
	return c, nil
}

// parseCapacities refuses the whole file if one entry is wrong. former reports that the keys are
// former identities.
func parseCapacities(data []byte) (of map[string]decide.Capacity, former bool, err error) {
	none := make(map[string]decide.Capacity)
	var version struct{ Version json.RawMessage }
	if err := json.Unmarshal(data, &version); err != nil {
		return none, false, err
	}
	var file capacitiesFile
	if former = version.Version == nil; former {
		err = json.Unmarshal(data, &file.Disks)
	} else if err = json.Unmarshal(data, &file); err == nil && file.Version != capacitiesVersion {
		err = fmt.Errorf("it is of version %d, and this agent knows versions up to %d", file.Version, capacitiesVersion)
	}
	if err != nil {
		return none, false, err
	}
	for id, c := range file.Disks {
		if err := c.Check(); err != nil {
			return none, false, fmt.Errorf("%q: %w", id, err)
		}
	}
	if file.Disks == nil {
		file.Disks = none // the file says null
	}
	return file.Disks, former, nil
}

// rename gives entries of former identities to their disks. An entry that may belong to several
// disks is left as it is, and the error lists it.
func (c *capacities) rename(disks []block.Disk) error {
	by := make(map[string][]block.Disk)
	for _, d := range disks {
		by[d.FormerIdentity()] = append(by[d.FormerIdentity()], d)
	}
	var errs []error
	for former, of := range by {
		entry, had := c.of[former]
		switch {
		case !had:
		case len(of) > 1:
			var names []string
			for _, d := range of {
				names = append(names, "/dev/"+d.Name)
			}
			errs = append(errs, fmt.Errorf("the capacity of %q may be that of any of %s: measure each with `fairlead io calibrate`", former, strings.Join(names, ", ")))
		default:
			delete(c.of, former)
			c.of[of[0].Identity()] = entry
		}
	}
	return errors.Join(errs...)
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
