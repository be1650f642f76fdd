// Package journal records every change of host state before it is made, so
// that it can be undone: by the agent when it stops, or by `fairlead restore`
// when the agent was killed.
//
// It is neither a history of the host nor a lock on it: others may change the
// same values, and what they changed is left alone and reported.
//
// The file is DIR/journal-BOOT, where BOOT is the kernel's boot id. Its first line
// is the version of the format. Each change is one line of JSON, appended by a
// single write, so a process that is killed at any point leaves whole lines. One
// byte of a line marks its entry as ended, so undoing needs no room on a full disk.
// Nothing is synced, because neither host state nor the journal has to outlive the
// boot; files of other boots are removed unread. docs/decisions/0004 says why this is
// not a database.
//
// Package agent opens the one Journal of a process; features turn their knobs
// through it, and the packages below kernel/ implement the knobs.
package journal

import (
	"errors"
	"fmt"
	"os"
	"time"
	"unicode/utf8"
)

// ErrBusy is returned by Open while another Journal holds the directory.
var ErrBusy = errors.New("journal is held by another process")

// ErrCorrupt is returned by Open for a damaged file, which it has set aside
// (renamed to NAME.corrupt). The next Open continues with the intact entries.
var ErrCorrupt = errors.New("journal is corrupt")

// ErrVersion is returned by Open for a file that another release of fairlead has
// written in another format. Open leaves the file as it is: that release can undo
// what it notes (`fairlead restore`).
var ErrVersion = errors.New("journal is another release's")

// maxText bounds each string of an entry, in bytes.
const maxText = 64 << 10

// Entry is one change that is, or may be, in force.
type Entry struct {
	Ref    Ref    `json:"ref"`
	Before string `json:"before"` // what Restore puts back
	Wrote  string `json:"wrote"`  // what we wrote last, or were about to write
	// Prior is the value that Wrote was to replace, where that was not Before.
	// It is set only while the write of Wrote may not have been made.
	Prior  *string   `json:"prior,omitempty"`
	Owner  Owner     `json:"owner"`
	Source string    `json:"source,omitempty"` // who knew the container at that Turn; see Attribute
	When   time.Time `json:"when"`             // of the last Turn that wrote
	Expiry time.Time `json:"expiry,omitzero"`  // of the last Turn; zero: holds until undone
}

// Ours says whether value is one that we wrote.
func (e Entry) Ours(value string) bool {
	return value == e.Wrote || e.Prior != nil && value == *e.Prior
}

// Expired says whether the Expiry of e has come by now.
func (e Entry) Expired(now time.Time) bool { return !e.Expiry.IsZero() && !e.Expiry.After(now) }

// Opener opens the Knob that a Ref names. If the Knob is an io.Closer, the
// Journal closes it after use. It returns ErrGone, wrapped or not,
// when the object no longer exists, and another error for an unknown Kind. A
// Knob that is an io.Closer belongs to the caller, which closes it.
type Opener func(Ref) (Knob, error)

// Journal holds the entries of this boot. It is safe for concurrent use. Knobs
// of one place (see Ref) are turned one at a time, those of different places
// side by side, so that one that hangs keeps no others waiting. What is recorded
// can always be listed at once: no lock is held for it while the host is read or
// written.
type Journal struct {
	places   places
	patience time.Duration // with what hangs
	now      func() time.Time

	notes
}

// Open opens the journal in dir (made with mode 0700 where it is missing) for
// the boot that is running. It needs no room on the disk, and neither does
// Restore. Errors: ErrBusy, ErrCorrupt, ErrVersion.
func Open(dir string) (*Journal, error) {
	boot, err := BootID("/proc")
	if err != nil {
		return nil, fmt.Errorf("open journal %s: %w", dir, err)
	}
	return OpenBoot(dir, boot)
}

// OpenBoot is Open for the boot with the given id (see BootID). Entries of any
// other boot are dropped.
func OpenBoot(dir, boot string) (*Journal, error) {
	s, err := lock(dir, boot)
	if err != nil {
		return nil, fmt.Errorf("open journal %s: %w", dir, err)
	}
	list, err := s.load()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open journal %s: %w", dir, err), s.close())
	}
	j := &Journal{patience: hangs, now: time.Now, notes: notes{store: s, entries: make(map[Ref]*numbered)}}
	for seq, e := range list {
		j.entries[e.Ref] = &numbered{e, seq}
		j.last = max(j.last, seq)
	}
	return j, nil
}

// Attribute makes the Journal note, in each entry that it makes for a container
// from now on, which runtime reported the container. It calls source while a knob
// is turned; source must not turn another.
func (j *Journal) Attribute(source func(container uint64) string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.source = source
}

// SetPatience sets how long a call to the host may make others wait, and all that do
// not return may hold up Restore, from 5 s to d. It is for hosts on which every call
// is slow, as one with emulated CPUs, and is called before any other method.
func (j *Journal) SetPatience(d time.Duration) { j.patience = d }

// Turn sets k to value, on behalf of by, until it is undone. See TurnUntil.
func (j *Journal) Turn(k Knob, value string, by Owner) error {
	return j.TurnUntil(k, value, by, time.Time{})
}

// TurnUntil sets k to value and notes that this lapses at expiry, by its monotonic
// reading if it has one: no step of the clock and no suspend brings it nearer. Zero
// means never; the journal itself undoes nothing, see Expired. It reads first, and
// writes nothing when the value is already there. If that is our own doing, the
// new expiry counts, and so does the owner if it is another container of the same
// feature. Otherwise it records the change and then makes it. A later Turn of the
// same Ref keeps the first Before, unless somebody else has changed the value
// meanwhile: Restore then puts that value back. Turning back to Before drops the
// entry, but does not overwrite what somebody else has set.
//
// When the write fails, or does not read back, TurnUntil puts the old value back
// if it can, and returns an error. It drops the entry unless the value may still
// be ours. A Knob whose object has gone gives ErrGone; one whose place is held by
// a call that does not return gives ErrStuck.
func (j *Journal) TurnUntil(k Knob, value string, by Owner, expiry time.Time) error {
	ref := k.Ref()
	if err := storable(ref.Kind, ref.Object, value, by.Feature); err != nil {
		return fmt.Errorf("turn %s %q: %w", ref.Kind, ref.Object, err)
	}
	leave, err := j.places.enter(ref.place(), j.patience)
	if err == nil {
		defer leave()
		err = j.turn(k, ref, value, by, expiry)
	}
	if err != nil {
		return fmt.Errorf("turn %s %s to %q: %w", ref.Kind, ref.Object, value, err)
	}
	return nil
}

func (j *Journal) turn(k Knob, ref Ref, value string, by Owner, expiry time.Time) error {
	if j.isClosed() {
		return os.ErrClosed
	}
	now, err := k.Read()
	if err != nil {
		return err
	}
	if err := storable(now); err != nil {
		return fmt.Errorf("value now: %w", err)
	}
	old, have := j.entry(ref)
	// Nobody else has changed the value since the last Turn, unless back to Before.
	kept := have && (old.Ours(now) || now == old.Before || unfinished(k, now, old.Before))
	switch {
	case kept && value == old.Before:
		// Until the entry is dropped, Restore finds either value right.
		if now != value {
			if err := j.write(k, now, value); err != nil {
				return err
			}
		}
		return j.drop(ref)
	case now == value:
		taken := by.Feature == old.Owner.Feature && by.Container != old.Owner.Container
		if !have || !old.Ours(value) || value == old.Wrote && old.Prior == nil && expiry.Equal(old.Expiry) && !taken {
			return nil
		}
		old.Wrote, old.Prior, old.Expiry = value, nil, expiry
		if taken {
			old.Owner, old.Source = by, j.attributed(by)
		}
		return j.put(old)
	}

	e := numbered{seq: old.seq, Entry: Entry{
		Ref: ref, Before: now, Wrote: value, Owner: by, Source: j.attributed(by), When: j.now().UTC(), Expiry: expiry,
	}}
	if kept {
		e.Before = old.Before
	}
	if now != e.Before {
		e.Prior = &now
	}
	if err := j.put(e); err != nil {
		return err
	}
	if err := j.write(k, now, value); err != nil {
		return errors.Join(err, j.retreat(k, e.Entry, now))
	}
	if e.Prior != nil {
		return j.change(ref, func(e *Entry) { e.Prior = nil })
	}
	return nil
}

// set is k.Write, with a note for as long as that changes something else, so that
// a kill in between leaves nothing changed for good. The note has lapsed from the
// beginning: no agent that finds it keeps what it tells of. Its place is that of k,
// which the caller has entered, so that nobody undoes it meanwhile.
func (j *Journal) set(k Knob, value string) error {
	x, ok := k.(Exposing)
	if !ok {
		return k.Write(value)
	}
	ref, before, during, err := x.Exposes()
	if err != nil {
		return err
	}
	if ref == (Ref{}) {
		return k.Write(value)
	}
	now := j.now()
	if err := j.put(numbered{Entry: Entry{Ref: ref, Before: before, Wrote: during, When: now.UTC(), Expiry: now}}); err != nil {
		return err
	}
	err = k.Write(value)
	if still, _, _, xerr := x.Exposes(); xerr == nil && still == (Ref{}) {
		return err // it was not put back, of which err tells: the note stays
	}
	return errors.Join(err, j.drop(ref))
}

// write sets k to value, which was now, and sees that it took.
func (j *Journal) write(k Knob, now, value string) error {
	if err := j.set(k, value); err != nil {
		return err
	}
	got, err := k.Read()
	if err != nil {
		return fmt.Errorf("read back: %w", err)
	}
	if got == value {
		return nil
	}
	err = fmt.Errorf("it reads back as %q", got)
	if back := j.set(k, now); back != nil {
		return errors.Join(err, fmt.Errorf("put back %q: %w", now, back))
	}
	return err
}

// retreat makes the journal match the host after a write of e that did not
// succeed; now is the value before that write.
func (j *Journal) retreat(k Knob, e Entry, now string) error {
	got, err := k.Read()
	switch {
	case errors.Is(err, ErrGone), err == nil && got == e.Before:
		return j.drop(e.Ref)
	case err == nil && got == now:
		return j.change(e.Ref, func(e *Entry) { e.Wrote, e.Prior = now, nil })
	}
	return nil // not known: Restore will find out
}

// storable refuses text that would not come back from the file unchanged.
func storable(texts ...string) error {
	for _, s := range texts {
		if len(s) > maxText {
			return fmt.Errorf("text of %d bytes is longer than the journal takes (%d)", len(s), maxText)
		}
		if !utf8.ValidString(s) {
			return fmt.Errorf("%q is not UTF-8", s)
		}
	}
	return nil
}
