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
	prefix   = "journal-" // of the name of a boot's file
	magic    = "fairlead journal "
	version  = "2" // of the file format
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

// record is one line of the file: the claims that knob N now has, those of Entry and With. A line
// that has ended is read with a nil Entry: the knob is as it was found.
type record struct {
	N      uint64   `json:"n"`
	Entry  *Entry   `json:"entry,omitempty"`
	Value  *string  `json:"value,omitempty"`  // the Entry's; nil: what it wrote
	Lapses int64    `json:"lapses,omitempty"` // the Entry's Expiry by the monotonic clock: see clock
	With   []record `json:"with,omitempty"`   // later claims on the same knob
}

// recordOf returns the record of a note.
func recordOf(n note, c clock) (r record) {
	for i, e := range n.entries(nil) {
		one := record{N: n.seq, Entry: &e, Lapses: c.lapses(e.Expiry)}
		if e.Value != e.Wrote {
			one.Value = &e.Value
		}
		e.Expiry = e.Expiry.UTC()
		if i == 0 {
			r = one
		} else {
			r.With = append(r.With, one)
		}
	}
	return r
}

// note is the reverse of recordOf.
func (r record) note(c clock) note {
	n := note{seq: r.N, Ref: r.Entry.Ref, Before: r.Entry.Before, Wrote: r.Entry.Wrote, Prior: r.Entry.Prior}
	for _, one := range append([]record{r}, r.With...) {
		if one.Entry == nil {
			continue
		}
		e := *one.Entry
		if e.Value = n.Wrote; one.Value != nil {
			e.Value = *one.Value
		}
		if one.Lapses != 0 {
			e.Expiry = c.expiry(one.Lapses)
		}
		n.claims = n.with(claim{e.Owner, e.Value, e.Source, e.When, e.Expiry})
	}
	return n
}

// store is the file of one boot: a header and one line for each knob, each appended by a single
// write. Putting a knob back overwrites one byte, the first of the knob's last line. A kill cannot
// cut one byte in two, and it needs no room on a full disk. A lock on its directory protects the
// file.
type store struct {
	dir   *os.File // carries the lock
	path  string
	file  *os.File // nil before the first record
	clock clock
	layout
}

// layout is the position of the records in a file.
type layout struct {
	size  int64            // of the intact part
	lines int              // records, superseded ones too
	at    map[uint64]int64 // where the last line of each knob begins
}

// dropped is the first byte of a line that has ended, in place of a digit of its checksum.
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

// acquire takes the lock. A process that was just killed may need a moment to release it.
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

// load reads the notes by number. It changes the disk only if the file is damaged: then it keeps
// the intact lines, sets the file aside, and returns ErrCorrupt. It leaves a file in another format
// as it is, and returns ErrVersion.
func (s *store) load() (map[uint64]note, error) {
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
	notes, layout, damage := parse(data, s.clock)
	var whole []*note
	for _, n := range notes {
		whole = append(whole, &n)
	}
	if damage == nil {
		s.file, s.layout = f, layout
		return notes, nil
	}
	f.Close()
	aside := s.path + ".corrupt"
	damage = fmt.Errorf("%w: %s: %w; set aside as %s, %d entries kept", ErrCorrupt, s.path, damage, aside, len(notes))
	// Link it to a second name first: the intact file then has a name at any moment.
	if err := os.Remove(aside); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, errors.Join(damage, err)
	}
	return nil, errors.Join(damage, os.Link(s.path, aside), s.rewrite(whole))
}

// rewrite replaces the file by a new one with just these notes.
func (s *store) rewrite(notes []*note) error {
	buf, next := []byte(header), layout{at: make(map[uint64]int64)}
	for _, n := range notes {
		line, err := format(recordOf(*n, s.clock))
		if err != nil {
			return err
		}
		next.at[n.seq] = int64(len(buf))
		buf = append(buf, line...)
	}
	next.size, next.lines = int64(len(buf)), len(notes)
	f, err := os.OpenFile(s.path+".new", os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if _, err := f.Write(buf); err != nil {
		// The new file may itself take the last room on the disk.
		return errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	if err := os.Rename(f.Name(), s.path); err != nil {
		return errors.Join(err, f.Close())
	}
	if s.file != nil {
		s.file.Close() // superseded
	}
	s.file, s.layout = f, next
	return nil
}

// add appends a note. Any living process sees it whole or not at all.
func (s *store) add(n note) error {
	line, err := format(recordOf(n, s.clock))
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
	s.at[n.seq] = s.size
	s.size += int64(len(line))
	s.lines++
	return nil
}

// drop ends a note.
func (s *store) drop(n uint64) error {
	if _, err := s.file.WriteAt([]byte{dropped}, s.at[n]); err != nil {
		return err
	}
	delete(s.at, n)
	return nil
}

// format returns the line of r: the CRC-32 (IEEE) of the JSON, a space, the JSON.
func format(r record) ([]byte, error) {
	raw, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "%08x %s\n", crc32.ChecksumIEEE(raw), raw), nil
}

// parse parses a whole file. It goes on after a line that it cannot read, and reports the first
// such line. A last line without an end is no damage: the kernel cuts a write short when its
// process is killed, and the change that the line announced was not made. It reads expiries by c.
func parse(data []byte, c clock) (notes map[uint64]note, l layout, damage error) {
	notes, l.at = make(map[uint64]note), make(map[uint64]int64)
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
		r, err := parseLine(line)
		switch {
		case err != nil && damage == nil:
			damage = fmt.Errorf("line %d: %w", l.lines+1, err)
		case err != nil:
		case r.Entry == nil:
			delete(notes, r.N)
			delete(l.at, r.N)
		default:
			notes[r.N], l.at[r.N] = r.note(c), at
		}
	}
	return notes, l, damage
}

func parseLine(line []byte) (record, error) {
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
	if r.Entry == nil || r.Entry.Ref.Kind == "" {
		return record{}, errors.New("names no object")
	}
	if ended {
		r.Entry = nil
	}
	return r, nil
}
