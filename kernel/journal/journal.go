// Package journal records every change of host state before it is made, so that the agent can undo
// it when it stops, or `fairlead restore` after the agent was killed.
//
// Several features may turn one knob. Each makes and withdraws its own claim on it. All claims
// together determine the value in force. The original value returns when the last claim is
// withdrawn.
//
// The journal is neither a history of the host nor a lock on it. Other programs may change the same
// values; it leaves their changes alone and reports them.
//
// The file is DIR/journal-BOOT, where BOOT is the kernel's boot id. Its first line is the version
// of the format. Each change of a knob is one line of JSON with all claims on it, appended by a
// single write. So a process that is killed at any point leaves whole lines. One byte of a line
// marks its knob as put back, so undoing needs no room on a full disk. Nothing is synced, because
// neither host state nor the journal has to outlive the boot. Files of other boots are removed
// unread. docs/decisions/0004 explains why this is not a database.
//
// Package agent opens the one Journal of a process. Features turn their knobs through it, and the
// packages below kernel/ implement the knobs.
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

// ErrCorrupt is returned by Open for a damaged file, which it renames to NAME.corrupt, and for a
// file that lacked entries of its copy. The next Open continues with the intact entries of both.
var ErrCorrupt = errors.New("journal is corrupt")

// ErrVersion is returned by Open for a file of another release, which has another format. Open
// leaves the file unchanged: that release can undo its entries (`fairlead restore`).
var ErrVersion = errors.New("journal is another release's")

// ErrChanged is returned by TurnGiven when the host's owner has set another value.
var ErrChanged = errors.New("changed by somebody else")

// maxText bounds each string of an entry, in bytes.
const maxText = 64 << 10

// Entry is one feature's claim on a knob, which is or may be in force, and the knob's value before
// any claim. Entries of one Ref differ only in their claims.
type Entry struct {
	Ref    Ref    `json:"ref"`
	Before string `json:"before"` // what Restore puts back once the last claim has gone
	Wrote  string `json:"wrote"`  // the last value written or about to be: the result of all claims
	// Prior is the value that Wrote was to replace, if it differs from Before. It is set only
	// while the write of Wrote may not have been made.
	Prior  *string   `json:"prior,omitempty"`
	Owner  Owner     `json:"owner"`            // the feature and container that make the claim
	Value  string    `json:"-"`                // the value claimed
	Source string    `json:"source,omitempty"` // the runtime that reported the container at that Turn; see Attribute
	When   time.Time `json:"when"`             // of the last Turn that changed Value
	Expiry time.Time `json:"expiry,omitzero"`  // of the last Turn; zero: holds until undone
}

// Ours reports whether fairlead wrote value.
func (e Entry) Ours(value string) bool {
	return value == e.Wrote || e.Prior != nil && value == *e.Prior
}

// Expired reports whether the Expiry of e has come by now.
func (e Entry) Expired(now time.Time) bool { return !e.Expiry.IsZero() && !e.Expiry.After(now) }

// Opener opens the Knob that a Ref names. If the Knob is an io.Closer, the Journal closes it after
// use. It returns ErrGone, wrapped or not, when the object no longer exists, and another error for
// an unknown Kind. A Knob that is an io.Closer belongs to the caller, which closes it.
type Opener func(Ref) (Knob, error)

// Journal holds the entries of this boot. It is safe for concurrent use. Knobs of one place (see
// Ref) are turned one at a time, and knobs of different places in parallel, so a knob that hangs
// blocks no other place. Listing the entries never waits: no lock on them is held while the host is
// read or written.
type Journal struct {
	places   places
	patience time.Duration // how long a call that hangs may block others
	now      func() time.Time

	notes
}

// Open opens the journal in dir for the running boot. It creates a missing dir with mode 0700.
// Neither Open nor Restore needs room on the disk. A second directory keeps a copy, in case the
// file in dir is damaged or removed; "": none. Errors: ErrBusy, ErrCorrupt, ErrVersion.
func Open(dir, second string) (*Journal, error) {
	boot, err := BootID("/proc")
	if err != nil {
		return nil, fmt.Errorf("open journal %s: %w", dir, err)
	}
	return openBoot(dir, second, boot)
}

// openBoot is Open for the boot with the given id (see BootID). Entries of any other boot are
// dropped.
func openBoot(dir, second, boot string) (*Journal, error) {
	s, err := lock(dir, second, boot)
	if err != nil {
		return nil, fmt.Errorf("open journal %s: %w", dir, err)
	}
	list, err := s.load()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open journal %s: %w", dir, err), s.close())
	}
	j := &Journal{patience: hangs, now: time.Now, notes: notes{store: s, byRef: make(map[Ref]*note)}}
	for seq, n := range list {
		j.byRef[n.Ref] = &n
		j.last = max(j.last, seq)
	}
	return j, nil
}

// Attribute makes the Journal record, in each later entry for a container, the runtime that
// reported the container. The Journal calls source while it turns a knob; source must not turn
// another.
func (j *Journal) Attribute(source func(container uint64) string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.source = source
}

// SetPatience replaces two limits of 5 s by d: how long one call to the host may block others, and
// how long all calls that hang may delay Restore. It is for hosts on which every call is slow, such
// as those with emulated CPUs. Call it before any other method.
func (j *Journal) SetPatience(d time.Duration) { j.patience = d }

// Turn sets k to value on behalf of by, until it is undone. See TurnUntil.
func (j *Journal) Turn(k Knob, value string, by Owner) error {
	return j.TurnUntil(k, value, by, time.Time{})
}

// TurnUntil claims value for k on behalf of by, and sets k to the result of all claims on it. A
// single claim sets its own value. For several, a [Composed] determines the result; for any other
// Knob the latest claim counts. A feature has one claim on a knob: a second Turn changes the claim,
// and its owner is the container that turned last. The claim lapses at expiry, by the monotonic
// reading if expiry has one: no step of the clock and no suspend brings it nearer. Zero means
// never. The journal itself undoes nothing, see Expired.
//
// TurnUntil reads first, and writes nothing when the value is already there. Otherwise it records
// the change and then makes it. A later Turn of the same Ref keeps the first Before, unless another
// program has changed the value meanwhile: Restore then puts that value back. Turning back to
// Before takes the claim back, and with the last claim the entry, but does not overwrite another
// program's value.
//
// When the write fails, or does not read back, TurnUntil puts the old value back if it can, and
// returns an error. It drops the claim unless the value may still be ours. It returns ErrGone when
// the object has gone, and ErrStuck while a call that does not return holds the place.
func (j *Journal) TurnUntil(k Knob, value string, by Owner, expiry time.Time) error {
	return j.turnIf(k, nil, value, by, expiry)
}

// TurnGiven is TurnUntil for a value that depends on what the host's owner had set (see Given). If
// Given has changed, it changes nothing and returns ErrChanged.
func (j *Journal) TurnGiven(k Knob, given, value string, by Owner, expiry time.Time) error {
	return j.turnIf(k, &given, value, by, expiry)
}

func (j *Journal) turnIf(k Knob, given *string, value string, by Owner, expiry time.Time) error {
	defer j.intact()
	ref := k.Ref()
	if err := storable(ref.Kind, ref.Object, value, by.Feature); err != nil {
		return fmt.Errorf("turn %s %q: %w", ref.Kind, ref.Object, err)
	}
	leave, err := j.places.enter(ref.place(), j.patience)
	if err == nil {
		defer leave()
		err = j.turn(k, given, Entry{Ref: ref, Owner: by, Value: value, Expiry: expiry})
	}
	if err != nil {
		return fmt.Errorf("turn %s %s to %q: %w", ref.Kind, ref.Object, value, err)
	}
	return nil
}

// turn makes the claim c.
func (j *Journal) turn(k Knob, given *string, c Entry) error {
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
	old, have := j.note(c.Ref)
	if m, ok := k.(marked); ok && !have {
		if before, ours := m.Unmarked(now); ours {
			old, have = note{Ref: c.Ref, Before: before, Wrote: now}, true
		}
	}
	// kept: since the last Turn no other program changed the value, except back to Before.
	kept := have && (now == old.Before || old.ours(k, now))
	next := note{seq: old.seq, Ref: c.Ref, Before: now, claims: old.claims}
	if kept {
		next.Before = old.Before
	}
	if given != nil && *given != next.Before {
		return fmt.Errorf("%w: %q, was %q", ErrChanged, next.Before, *given)
	}
	next.claims = next.without(func(o Entry) bool { return o.Owner.Feature == c.Owner.Feature })
	if c.Value != next.Before {
		next.claims = old.with(claim{c.Owner, c.Value, j.attributed(c.Owner), j.now().UTC(), c.Expiry})
	}
	next.Wrote = next.composed(k)
	switch {
	case now == next.Wrote && !kept: // the value is right already, but fairlead did not write it
		if !have {
			return nil
		}
		return j.change(c.Ref, func(n note) note { n.claims = next.claims; return n })
	case len(next.claims) == 0:
		// Until the entry is dropped, Restore accepts either value.
		if now != next.Wrote {
			if err := j.write(k, now, next.Wrote); err != nil {
				return err
			}
		}
		return j.drop(c.Ref)
	case now == next.Wrote:
		return j.put(next)
	}

	if now != next.Before {
		next.Prior = &now
	}
	if err := j.put(next); err != nil {
		return err
	}
	if err := j.write(k, now, next.Wrote); err != nil {
		return errors.Join(err, j.retreat(k, next, old, now))
	}
	return j.change(c.Ref, func(n note) note { n.Prior = nil; return n })
}

// set calls k.Write. If the write temporarily changes another part of the host, a note records that
// change, so that a kill in between leaves nothing changed for good. The note is expired from the
// start: an agent that finds it undoes the change. Its place is that of k, which the caller has
// entered, so no other goroutine undoes it meanwhile.
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
	lapsed := claim{Value: during, When: now.UTC(), Expiry: now}
	if err := j.put(note{Ref: ref, Before: before, Wrote: during, claims: []claim{lapsed}}); err != nil {
		return err
	}
	err = k.Write(value)
	if still, _, _, xerr := x.Exposes(); xerr == nil && still == (Ref{}) {
		return err // the other value was not put back, as err explains: the note stays
	}
	return errors.Join(err, j.drop(ref))
}

// write changes k from now to value, and reads it back.
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

// retreat makes the journal match the host after a failed write of tried. old is the note, and now
// the value, from before that write.
func (j *Journal) retreat(k Knob, tried, old note, now string) error {
	got, err := k.Read()
	switch {
	case errors.Is(err, ErrGone):
		return j.drop(tried.Ref)
	case err != nil, got != now && got != tried.Before:
		return nil // not known: Restore will find out
	case len(old.claims) == 0, len(old.claims) == 1 && got == tried.Before:
		return j.drop(tried.Ref)
	}
	tried.Wrote, tried.Prior, tried.claims = got, nil, old.claims
	return j.put(tried)
}

// storable refuses text that the file could not return unchanged.
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
