package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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

// record is one line of the file: the current claims on knob N, in Entry and With. A dropped line
// is read with a nil Entry: the knob has its original value.
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

// store keeps the notes of one boot in two files, so that one may be damaged or lost. Locks on
// their directories protect them. A note that is in only one of them counts: undoing compares with
// the host, so an extra note does no harm.
type store struct {
	main file
	copy *file // nil: there is none, or it cannot be written
}

// file is a header and one line for each knob, each appended by a single write. Putting a knob back
// overwrites one byte, the first of the knob's last line. A kill cannot cut one byte in two, and it
// needs no room on a full disk.
type file struct {
	dir   *os.File // carries the lock
	path  string
	open  *os.File // nil before the first record
	clock clock
	layout
}

// layout is the position of the records in a file.
type layout struct {
	size  int64            // of the intact part
	lines int              // records, superseded ones too
	at    map[uint64]int64 // where the last line of each knob begins
}

// dropped is the first byte of a dropped line, in place of a digit of its checksum.
const dropped = '-'

// lock makes and locks dir, and second unless it is "". It removes the files of other boots in
// both.
func lock(dir, second, boot string) (*store, error) {
	if !bootID.MatchString(boot) {
		return nil, fmt.Errorf("boot id %q is not one", boot)
	}
	main, err := lockFile(dir, boot)
	if err != nil {
		return nil, err
	}
	s := &store{main: *main}
	if second != "" {
		s.copy, _ = lockFile(second, boot) // the journal works without it
	}
	return s, nil
}

func lockFile(dir, boot string) (*file, error) {
	c, err := readClock()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := acquire(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	names, err := os.ReadDir(dir)
	for _, n := range names {
		if err == nil && strings.HasPrefix(n.Name(), prefix) && !strings.HasPrefix(n.Name(), prefix+boot) {
			err = os.Remove(filepath.Join(dir, n.Name()))
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("drop the journal of another boot: %w", err), f.Close())
	}
	return &file{dir: f, path: filepath.Join(dir, prefix+boot), clock: c}, nil
}

// acquire takes the lock. A process that was just killed may need a moment to release it.
func acquire(dir *os.File) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
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
	err := s.main.close()
	if s.copy == nil {
		return err
	}
	if len(s.copy.at) == 0 {
		os.Remove(s.copy.path)
		os.Remove(filepath.Dir(s.copy.path)) // unless it contains something else
	}
	return errors.Join(s.copy.close(), err)
}

// load reads the notes by number, and makes the files equal. It leaves a file in another format
// unchanged, and returns ErrVersion. If the first file is damaged or lacked notes of the copy, it
// keeps the intact lines, sets a damaged file aside, and returns ErrCorrupt.
func (s *store) load() (map[uint64]note, error) {
	notes, damage, err := s.main.load()
	if err != nil {
		return nil, err
	}
	found := 0
	if s.copy != nil {
		more, _, err := s.copy.load()
		if err != nil { // of another release, or unreadable: the next rewrite replaces it
			more = nil
		}
		found = merge(notes, more)
	}
	var whole []*note
	for _, n := range notes {
		whole = append(whole, &n)
	}
	switch {
	case damage != nil:
		aside := s.main.path + ".corrupt"
		damage = fmt.Errorf("%w: %s: %w; set aside as %s, %d entries kept, %d of them from its copy", ErrCorrupt, s.main.path, damage, aside, len(notes), found)
		// Link it to a second name first, so that the intact file always has a name.
		if err := os.Remove(aside); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, errors.Join(damage, err)
		}
		damage = errors.Join(damage, os.Link(s.main.path, aside))
	case found > 0:
		damage = fmt.Errorf("%w: %s lacks %d of %d entries; taken from its copy", ErrCorrupt, s.main.path, found, len(notes))
	}
	if damage != nil || s.main.open == nil {
		err = s.main.rewrite(whole)
		if damage == nil && errors.Is(err, unix.ENOSPC) {
			err = nil // there is nothing to undo; the first entry tries again
		}
	}
	s.second(func(c *file) error { return c.rewrite(whole) })
	return notes, errors.Join(damage, err)
}

// merge adds the notes of knobs that are only in more, and returns their number.
func merge(notes, more map[uint64]note) (found int) {
	have, last := make(map[Ref]bool), uint64(0)
	for seq, n := range notes {
		have[n.Ref], last = true, max(last, seq)
	}
	for _, seq := range slices.Sorted(maps.Keys(more)) {
		n := more[seq]
		if have[n.Ref] {
			continue
		}
		if _, taken := notes[seq]; taken {
			last++
			n.seq = last
		}
		notes[n.seq], last = n, max(last, n.seq)
		found++
	}
	return found
}

// second makes a change to the copy. It removes a copy that cannot be written: an outdated one
// would contain notes that have been undone.
func (s *store) second(change func(*file) error) {
	if s.copy == nil {
		return
	}
	if err := change(s.copy); err != nil {
		s.copy.close()
		os.Remove(s.copy.path)
		s.copy = nil
	}
}

// rewrite replaces the files by new ones with only these notes.
func (s *store) rewrite(notes []*note) error {
	err := s.main.rewrite(notes)
	if err == nil {
		s.second(func(c *file) error { return c.rewrite(notes) })
	}
	return err
}

// add appends a note. Any living process sees it whole or not at all.
func (s *store) add(n note) error {
	err := s.main.add(n)
	if err == nil {
		s.second(func(c *file) error { return c.add(n) })
	}
	return err
}

// drop ends a note, in the copy first: a kill in between leaves the note.
func (s *store) drop(n uint64) error {
	s.second(func(c *file) error { return c.drop(n) })
	return s.main.drop(n)
}

func (f *file) close() error {
	err := f.dir.Close()
	if f.open != nil {
		err = errors.Join(f.open.Close(), err)
	}
	return err
}

// load reads the notes by number, and changes nothing. A missing file has none. damage says what is
// damaged; err means that the file cannot be read: ErrVersion.
func (f *file) load() (notes map[uint64]note, damage, err error) {
	data, err := os.ReadFile(f.path)
	if errors.Is(err, os.ErrNotExist) {
		return make(map[uint64]note), nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	first, _, _ := strings.Cut(string(data[:min(len(data), 64)]), "\n")
	if other, ok := strings.CutPrefix(first, magic); ok && other != version {
		return nil, nil, fmt.Errorf("%w: %s has form %q, this program reads %s", ErrVersion, f.path, other, version)
	}
	notes, layout, damage := parse(data, f.clock)
	if damage == nil {
		if f.open, err = os.OpenFile(f.path, os.O_RDWR, 0); err == nil {
			f.layout = layout
		}
	}
	return notes, damage, err
}

// rewrite replaces the file by a new one with only these notes.
func (f *file) rewrite(notes []*note) error {
	buf, next := []byte(header), layout{at: make(map[uint64]int64)}
	for _, n := range notes {
		line, err := format(recordOf(*n, f.clock))
		if err != nil {
			return err
		}
		next.at[n.seq] = int64(len(buf))
		buf = append(buf, line...)
	}
	next.size, next.lines = int64(len(buf)), len(notes)
	to, err := os.OpenFile(f.path+".new", os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if _, err := to.Write(buf); err != nil {
		// The new file may itself use up the disk.
		return errors.Join(err, to.Close(), os.Remove(to.Name()))
	}
	if err := os.Rename(to.Name(), f.path); err != nil {
		return errors.Join(err, to.Close())
	}
	if f.open != nil {
		f.open.Close() // superseded
	}
	f.open, f.layout = to, next
	return nil
}

// add appends a note. Any living process sees it whole or not at all.
func (f *file) add(n note) error {
	line, err := format(recordOf(n, f.clock))
	if err != nil {
		return err
	}
	if f.open == nil {
		if err := f.rewrite(nil); err != nil {
			return err
		}
	}
	if _, err := f.open.WriteAt(line, f.size); err != nil {
		return errors.Join(err, f.open.Truncate(f.size))
	}
	f.at[n.seq] = f.size
	f.size += int64(len(line))
	f.lines++
	return nil
}

// drop ends a note.
func (f *file) drop(n uint64) error {
	if _, err := f.open.WriteAt([]byte{dropped}, f.at[n]); err != nil {
		return err
	}
	delete(f.at, n)
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

// parse parses a whole file. It skips a line that it cannot read, and reports the first such line.
// An incomplete last line is no damage: the kernel cuts a write short when its process is killed,
// and the announced change was not made. parse converts expiries by c.
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
