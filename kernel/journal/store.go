package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	prefix   = "journal-" // of the file of one boot
	header   = "fairlead journal 1\n"
	patience = 500 * time.Millisecond
	slack    = 1000 // superseded records that are kept before the file is rewritten
)

var bootID = regexp.MustCompile(`^[0-9a-f-]{1,64}$`)

// BootID reads the kernel's boot id below proc.
func BootID(proc string) (string, error) {
	b, err := os.ReadFile(filepath.Join(proc, "sys/kernel/random/boot_id"))
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// record is one line of the file: entry N is now Entry, or is dropped.
type record struct {
	N     uint64 `json:"n"`
	Entry *Entry `json:"entry,omitempty"`
}

// store is the file of one boot: a header and one line for each record, each
// appended by a single write. It is held under a lock on its directory.
type store struct {
	dir   *os.File // carries the lock
	path  string
	file  *os.File
	size  int64 // of what is whole
	lines int   // records in file
}

// lock makes and locks dir, and removes what other boots left.
func lock(dir, boot string) (*store, error) {
	if !bootID.MatchString(boot) {
		return nil, fmt.Errorf("boot id %q is not one", boot)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	s := &store{dir: f, path: filepath.Join(dir, prefix+boot)}
	if err := s.acquire(); err != nil {
		return nil, errors.Join(err, s.close())
	}
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	for _, n := range names {
		if strings.HasPrefix(n.Name(), prefix) && !strings.HasPrefix(n.Name(), prefix+boot) {
			if err := os.Remove(filepath.Join(dir, n.Name())); err != nil {
				return nil, errors.Join(fmt.Errorf("drop the journal of another boot: %w", err), s.close())
			}
		}
	}
	return s, nil
}

// acquire takes the lock. A process that was just killed may need a moment to
// let go of it.
func (s *store) acquire() error {
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(s.dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("lock: %w", err)
		case time.Now().After(deadline):
			return ErrBusy
		}
	}
}

func (s *store) close() error {
	err := s.dir.Close()
	if s.file != nil {
		err = errors.Join(s.file.Close(), err)
	}
	return err
}

// load reads the entries by number. Of a damaged file it keeps what is whole,
// sets the rest aside, and reports ErrCorrupt.
func (s *store) load() (map[uint64]Entry, error) {
	data, err := os.ReadFile(s.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, s.rewrite(nil)
	}
	if err != nil {
		return nil, err
	}
	entries, damage := parse(data)
	if damage == nil {
		return entries, s.rewrite(entries)
	}
	aside := s.path + ".corrupt"
	damage = fmt.Errorf("%w: %s: %w; set aside as %s, %d entries kept", ErrCorrupt, s.path, damage, aside, len(entries))
	if err := os.Rename(s.path, aside); err != nil {
		return nil, errors.Join(damage, err)
	}
	return nil, errors.Join(damage, s.rewrite(entries))
}

// rewrite puts a new file with just the entries in place of the old one.
func (s *store) rewrite(entries map[uint64]Entry) error {
	buf := []byte(header)
	for n, e := range entries {
		line, err := format(record{N: n, Entry: &e})
		if err != nil {
			return err
		}
		buf = append(buf, line...)
	}
	f, err := os.OpenFile(s.path+".new", os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if _, err := f.Write(buf); err != nil {
		// What it takes up may be all the room that there is.
		return errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	if err := os.Rename(f.Name(), s.path); err != nil {
		return errors.Join(err, f.Close())
	}
	if s.file != nil {
		s.file.Close() // nothing in it counts any more
	}
	s.file, s.size, s.lines = f, int64(len(buf)), len(entries)
	return nil
}

// add appends r, whole or not at all as far as a living process can see.
func (s *store) add(r record) error {
	line, err := format(r)
	if err != nil {
		return err
	}
	if _, err := s.file.WriteAt(line, s.size); err != nil {
		return errors.Join(err, s.file.Truncate(s.size))
	}
	s.size += int64(len(line))
	s.lines++
	return nil
}

// format gives the line of r: the CRC-32 (IEEE) of the JSON, a space, the JSON.
func format(r record) ([]byte, error) {
	raw, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "%08x %s\n", crc32.ChecksumIEEE(raw), raw), nil
}

// parse reads a whole file. It goes on after a line that it can't read, and
// tells the first one. A last line without an end is no damage: the kernel cuts
// a write short when its process is killed, and what that line was to announce
// has not been done (an entry), or is found done by Restore (the end of one).
func parse(data []byte) (entries map[uint64]Entry, damage error) {
	entries = make(map[uint64]Entry)
	body, ok := bytes.CutPrefix(data, []byte(header))
	if !ok {
		damage = errors.New("line 1: no header")
	}
	for i := 2; len(body) > 0; i++ {
		line, rest, ended := bytes.Cut(body, []byte("\n"))
		body = rest
		if !ended {
			break
		}
		r, err := parseLine(line)
		switch {
		case err != nil && damage == nil:
			damage = fmt.Errorf("line %d: %w", i, err)
		case err != nil:
		case r.Entry == nil:
			delete(entries, r.N)
		default:
			entries[r.N] = *r.Entry
		}
	}
	return entries, damage
}

func parseLine(line []byte) (record, error) {
	sum, raw, _ := bytes.Cut(line, []byte(" "))
	if string(sum) != fmt.Sprintf("%08x", crc32.ChecksumIEEE(raw)) {
		return record{}, errors.New("checksum does not match")
	}
	var r record
	if err := json.Unmarshal(raw, &r); err != nil {
		return record{}, err
	}
	if r.Entry != nil && r.Entry.Ref.Kind == "" {
		return record{}, errors.New("names no object")
	}
	return r, nil
}
