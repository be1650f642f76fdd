package kernel

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// StateFile keeps an object for the next agent, as JSON. It belongs to one agent at a time.
type StateFile struct {
	Path    string // "": nothing is kept
	Most    int    // limit in bytes
	Durable bool   // it survives a crash of the host
	// Proc is where proc is mounted. It marks an object as valid for one boot only, as the ids of
	// containers and processes are; "": the object is valid for any boot.
	Proc string
}

// Read decodes the object into in, and reports whether there is one.
func (f StateFile) Read(in any) (bool, error) {
	file, err := os.Open(f.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, int64(f.Most)))
	if err != nil {
		return false, err
	}
	if f.Proc != "" {
		var of struct{ Boot string }
		err := json.Unmarshal(data, &of)
		boot, berr := journal.BootID(f.Proc)
		if err == nil && (berr != nil || of.Boot != boot) {
			return false, berr
		}
	}
	if err := json.Unmarshal(data, in); err != nil {
		return false, fmt.Errorf("read %s: %w", f.Path, err)
	}
	return true, nil
}

// Write replaces the object, which has at least one field, atomically.
func (f StateFile) Write(object any) error {
	if f.Path == "" {
		return nil
	}
	data, err := json.Marshal(object)
	if err != nil {
		return err
	}
	if f.Proc != "" {
		boot, err := journal.BootID(f.Proc)
		if err != nil {
			return err
		}
		data = append(fmt.Appendf(nil, `{"boot":%q,`, boot), data[1:]...)
	}
	if len(data) > f.Most {
		return fmt.Errorf("write %s: %d bytes are more than the %d that it may have", f.Path, len(data), f.Most)
	}
	next, err := os.OpenFile(f.Path+".next", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = next.Write(append(data, '\n'))
	if err == nil && f.Durable {
		err = next.Sync()
	}
	if err = errors.Join(err, next.Close()); err != nil {
		os.Remove(next.Name())
		return err
	}
	return os.Rename(next.Name(), f.Path)
}
