package volume

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/policy"
)

// The bounds and the form of the file.
const (
	mostBytes = 64 << 20
	version   = 1
)

// state is the file.
type state struct {
	Version  int           `json:"version"`
	Boot     string        `json:"boot"` // of what follows
	Uptime   time.Duration `json:"uptime_ns"`
	Top      int           `json:"top_index"`
	Devices  []device      `json:"devices"`
	Held     []policy.Decision
	Accounts []*Account `json:"accounts"`
}

// read returns nil if there is no file.
func read(path string) (*state, error) {
	if path == "" {
		return nil, nil
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, mostBytes))
	if err != nil {
		return nil, err
	}
	return parse(data)
}

// parse refuses the whole file if one part is wrong.
func parse(data []byte) (*state, error) {
	s := new(state)
	if err := json.Unmarshal(data, s); err != nil {
		return nil, err
	}
	if s.Version != version {
		return nil, fmt.Errorf("it is of version %d, and this agent knows version %d", s.Version, version)
	}
	if len(s.Accounts) > mostAccounts || len(s.Devices) > mostDevices {
		return nil, fmt.Errorf("%d accounts and %d devices are too many", len(s.Accounts), len(s.Devices))
	}
	for _, a := range s.Accounts {
		if a == nil || a.Name == "" {
			return nil, errors.New("an account without a name")
		}
		if a.Days == nil {
			a.Days = make(map[string]Amount)
		}
		if a.Months == nil {
			a.Months = make(map[string]Amount)
		}
		for layout, rows := range map[string]map[string]Amount{dayLayout: a.Days, monthLayout: a.Months} {
			for key := range rows {
				if _, err := time.Parse(layout, key); err != nil {
					return nil, fmt.Errorf("account %q: %w", a.Name, err)
				}
			}
		}
	}
	return s, nil
}

// Save writes the file, if anything has changed.
func (l *Ledger) Save() error {
	l.age()
	if !l.dirty || l.cfg.Path == "" {
		return nil
	}
	s := state{Version: version, Boot: l.cfg.Boot, Uptime: l.cfg.Uptime(), Top: l.newTop, Held: l.held}
	for _, name := range slices.Sorted(maps.Keys(l.accounts)) {
		s.Accounts = append(s.Accounts, l.accounts[name])
	}
	for _, d := range slices.SortedFunc(maps.Keys(l.devices), func(a, b Device) int { return cmp.Or(cmp.Compare(a.NetNS, b.NetNS), a.Index-b.Index) }) {
		s.Devices = append(s.Devices, *l.devices[d])
	}
	data, err := json.Marshal(s)
	if err == nil && len(data) >= mostBytes {
		err = fmt.Errorf("%d bytes are too many", len(data))
	}
	if err == nil {
		err = replace(l.cfg.Path, data)
	}
	if err != nil {
		return fmt.Errorf("write volumes: %w", err)
	}
	l.dirty = false
	return nil
}

// replace writes a file that is whole also after a crash of the host.
func replace(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path+".next", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return os.Rename(f.Name(), path)
}
