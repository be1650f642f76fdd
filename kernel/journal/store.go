package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	prefix   = "journal-" // of the file of one boot
	magic    = "fairlead journal "
	version  = "1" // of the file's form
	header   = magic + version + "\n"
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

// record is one line of the file: entry N is now Entry, or is dropped (nil; only
// the first releases appended a line for that).
type record struct {
	N      uint64 `json:"n"`
	Entry  *Entry `json:"entry,omitempty"`
	Lapses int64  `json:"lapses,omitempty"` // the Entry's Expiry by the monotonic clock: see clock
}

// store is the file of one boot: a header and one line for each entry, each
// appended by a single write. The end of an entry is one byte, written over the
// first of its last line: a kill cannot cut that in two, and it needs no room on a
// full disk. The file is held under a lock on its directory.
type store struct {
	dir   *os.File // carries the lock
	path  string
	file  *os.File // nil before the first record
	clock clock
	layout
}

// layout is where the records of a file are.
type layout struct {
	size  int64            // of what is whole
	lines int              // records, superseded ones too
	at    map[uint64]int64 // where the last line of each entry begins
}

// dropped is the first byte of a line whose entry has ended, in place of a digit
// of its checksum.
const dropped = '-'

// lock makes and locks dir, and removes the files of other boots.
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
	if s.clock, err = readClock(); err != nil {
		return nil, errors.Join(err, s.close())
	}
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
// release it.
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

// load reads the entries by number. It changes nothing on the disk but where the
// file is damaged: then it keeps what is whole, sets the rest aside, and reports
// ErrCorrupt. A file in another form is left as it is: ErrVersion.
func (s *store) load() (map[uint64]Entry, error) {
	f, err := os.OpenFile(s.path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		if err := s.rewrite(nil); !errors.Is(err, unix.ENOSPC) {
			return nil, err
		}
		return nil, nil // there is nothing to undo; the first entry tries again
	}
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	first, _, _ := strings.Cut(string(data[:min(len(data), 64)]), "\n")
	if other, ok := strings.CutPrefix(first, magic); ok && other != version {
		return nil, errors.Join(fmt.Errorf("%w: %s has form %q, this program reads %s", ErrVersion, s.path, other, version), f.Close())
	}
	entries, layout, damage := parse(data, s.clock)
	if damage == nil {
		s.file, s.layout = f, layout
		return entries, nil
	}
	f.Close()
	aside := s.path + ".corrupt"
	damage = fmt.Errorf("%w: %s: %w; set aside as %s, %d entries kept", ErrCorrupt, s.path, damage, aside, len(entries))
	// Give it a second name first: the intact file then has a name at any moment.
	if err := os.Remove(aside); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, errors.Join(damage, err)
	}
	return nil, errors.Join(damage, os.Link(s.path, aside), s.rewrite(entries))
}

// rewrite puts a new file with just the entries in place of the old one.
func (s *store) rewrite(entries map[uint64]Entry) error {
	buf, next := []byte(header), layout{at: make(map[uint64]int64)}
	for n, e := range entries {
		line, err := format(record{n, &e, s.clock.lapses(e.Expiry)})
		if err != nil {
			return err
		}
		next.at[n] = int64(len(buf))
		buf = append(buf, line...)
	}
	next.size, next.lines = int64(len(buf)), len(entries)
	f, err := os.OpenFile(s.path+".new", os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if _, err := f.Write(buf); err != nil {
		// Its own size may be all the room that there is.
		return errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	if err := os.Rename(f.Name(), s.path); err != nil {
		return errors.Join(err, f.Close())
	}
	if s.file != nil {
		s.file.Close() // nothing in it counts any more
	}
	s.file, s.layout = f, next
	return nil
}

// add appends an entry, whole or not at all as far as a living process can see.
func (s *store) add(n uint64, e Entry) error {
	line, err := format(record{n, &e, s.clock.lapses(e.Expiry)})
	if err != nil {
		return err
	}
	if s.file == nil {
		if err := s.rewrite(nil); err != nil {
			return err
		}
	}
	if _, err := s.file.WriteAt(line, s.size); err != nil {
		return errors.Join(err, s.file.Truncate(s.size))
	}
	s.at[n] = s.size
	s.size += int64(len(line))
	s.lines++
	return nil
}

// drop ends an entry.
func (s *store) drop(n uint64) error {
	if _, err := s.file.WriteAt([]byte{dropped}, s.at[n]); err != nil {
		return err
	}
	delete(s.at, n)
	return nil
}

// format returns the line of r: the CRC-32 (IEEE) of the JSON, a space, the JSON.
func format(r record) ([]byte, error) {
	if r.Entry != nil && !r.Entry.Expiry.IsZero() {
		e := *r.Entry
		e.Expiry = e.Expiry.UTC()
		r.Entry = &e
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "%08x %s\n", crc32.ChecksumIEEE(raw), raw), nil
}

// parse reads a whole file. It goes on after a line that it cannot read, and
// reports the first such line. A last line without an end is no damage: the
// kernel cuts a write short when its process is killed, and the change that the
// line announced was not made. The entries' expiries are by the given clock.
func parse(data []byte, c clock) (entries map[uint64]Entry, l layout, damage error) {
	entries, l.at = make(map[uint64]Entry), make(map[uint64]int64)
	body, ok := bytes.CutPrefix(data, []byte(header))
	if !ok {
		damage = errors.New("line 1: no header")
	}
	l.size = int64(len(data) - len(body))
	for len(body) > 0 {
		line, rest, ended := bytes.Cut(body, []byte("\n"))
		body = rest
		if !ended {
			break
		}
		at := l.size
		l.size += int64(len(line)) + 1
		l.lines++
		r, err := parseLine(line, c)
		switch {
		case err != nil && damage == nil:
			damage = fmt.Errorf("line %d: %w", l.lines+1, err)
		case err != nil:
		case r.Entry == nil:
			delete(entries, r.N)
			delete(l.at, r.N)
		default:
			entries[r.N], l.at[r.N] = *r.Entry, at
		}
	}
	return entries, l, damage
}

func parseLine(line []byte, c clock) (record, error) {
	sum, raw, _ := bytes.Cut(line, []byte(" "))
	want, ended := fmt.Appendf(nil, "%08x", crc32.ChecksumIEEE(raw)), len(sum) > 0 && sum[0] == dropped
	if ended {
		want[0] = dropped
	}
	if !bytes.Equal(sum, want) {
		return record{}, errors.New("checksum does not match")
	}
	var r record
	if err := json.Unmarshal(raw, &r); err != nil {
		return record{}, err
	}
	if r.Entry != nil && r.Entry.Ref.Kind == "" {
		return record{}, errors.New("names no object")
	}
	if ended {
		r.Entry = nil
	}
	if r.Entry != nil && r.Lapses != 0 {
		r.Entry.Expiry = c.expiry(r.Lapses)
	}
	return r, nil
}
