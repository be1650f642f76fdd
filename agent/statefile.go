package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// stateFile is a file of the state directory, which belongs to one agent at a time.
type stateFile struct {
	path string
	most int // bytes
}

// read decodes the file into in, and reports whether it exists.
func (f stateFile) read(in any) (bool, error) {
	file, err := os.Open(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, int64(f.most)))
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(data, in); err != nil {
		return false, fmt.Errorf("read %s: %w", f.path, err)
	}
	return true, nil
}

// write replaces the file atomically.
func (f stateFile) write(out any) error {
	data, err := json.Marshal(out)
	if err != nil {
		return err
	}
	if len(data) > f.most {
		return fmt.Errorf("write %s: %d bytes are more than the %d that it may have", f.path, len(data), f.most)
	}
	next := f.path + ".next"
	if err := os.WriteFile(next, append(data, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(next, f.path)
}

// bootFile is a stateFile for one boot, like the ids of containers and processes. Its content is an
// object with the boot.
type bootFile struct {
	stateFile
	proc string
}

// file returns a file of the state directory, of at most so many bytes.
func (cfg Config) file(name string, most int) bootFile {
	return bootFile{stateFile{filepath.Join(cfg.StateDir, name), most}, cfg.Roots.Proc}
}

// write writes content for the present boot.
func (f bootFile) write(content func(boot string) any) error {
	boot, err := journal.BootID(f.proc)
	if err != nil {
		return err
	}
	return f.stateFile.write(content(boot))
}

// read is that of stateFile, for content of this boot.
func (f bootFile) read(in any) (bool, error) {
	var of struct{ Boot string }
	found, err := f.stateFile.read(&of)
	if err != nil || !found {
		return false, err
	}
	boot, err := journal.BootID(f.proc)
	if err != nil || of.Boot != boot {
		return false, err
	}
	return f.stateFile.read(in)
}
