package journal

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// notes are the entries, in the file and in memory. They do not access knobs.
//
// The lock writing is taken before mu. writing is held while the file is written. mu is never held
// during a wait.
type notes struct {
	writing sync.Mutex // one change at a time; guards store, last and untidy
	store   *store
	last    uint64 // highest number assigned
	untidy  int    // records allowed before the next attempt to rewrite the file, after a failed one

	mu     sync.Mutex    // guards the fields below; byRef changes with writing held too
	byRef  map[Ref]*note // a note is replaced, never changed
	closed bool
	source func(container uint64) string // nil: not known

	broken atomic.Bool
}

// Broken reports whether there was a panic in the Journal, or in a Knob or function that it called.
// The Journal may then differ from the host. The process must end at once, without undoing
// anything, and the next Open continues with the content of the file.
func (n *notes) Broken() bool { return n.broken.Load() }

// intact is deferred by every function that changes or lists the notes.
func (n *notes) intact() {
	if p := recover(); p != nil {
		n.broken.Store(true)
		panic(p)
	}
}

// Close releases the directory. Values in force stay in force. After Close, turning and restoring
// return os.ErrClosed. A second Close does nothing.
func (n *notes) Close() error {
	n.writing.Lock()
	defer n.writing.Unlock()
	n.mu.Lock()
	closed := n.closed
	n.closed = true
	n.mu.Unlock()
	if closed {
		return nil
	}
	return n.store.close()
}

func (n *notes) isClosed() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.closed
}

// Extend sets the expiry of the matching entries (zero: never). It does not change the host.
func (n *notes) Extend(match func(Entry) bool, expiry time.Time) error {
	return n.amend("extend", match, func(c *claim) { c.Expiry = expiry })
}

// Reassign changes the owner of the matching entries. It does not change the host. It is for a knob
// that several containers share, when its owner ends before the others.
func (n *notes) Reassign(match func(Entry) bool, to Owner) error {
	if err := storable(to.Feature); err != nil {
		return fmt.Errorf("reassign: %w", err)
	}
	source := n.attributed(to)
	return n.amend("reassign", match, func(c *claim) { c.Owner, c.Source = to, source })
}

// Rename replaces the Ref and the values of the matching entries by those that to returns. It does
// not change the host. It is for objects that were renamed, and for values that contain such a
// name. Other claims on the same object move with it. Rename continues after a failure. An entry
// keeps its Ref if another entry has the new one. A knob that is turned at the same time stays
// unchanged.
func (n *notes) Rename(match func(Entry) bool, to func(Entry) Entry) error {
	defer n.intact()
	if n.isClosed() {
		return os.ErrClosed
	}
	var errs []error
	for _, was := range n.sorted(match) {
		e := was.entries(match)[0]
		now := to(e)
		if now == e {
			continue
		}
		next := *was
		next.Ref, next.Before, next.Wrote, next.Prior, next.claims = now.Ref, now.Before, now.Wrote, now.Prior, slices.Clone(was.claims)
		for i := range next.claims {
			if next.claims[i].Value == was.Wrote {
				next.claims[i].Value = now.Wrote
			}
		}
		err := storable(now.Ref.Kind, now.Ref.Object, now.Wrote)
		if err == nil {
			err = n.rename(was, next)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("rename %s %s to %s: %w", e.Ref.Kind, e.Ref.Object, now.Ref.Object, err))
		}
	}
	return errors.Join(errs...)
}

func (n *notes) rename(was *note, now note) error {
	n.writing.Lock()
	defer n.writing.Unlock()
	n.mu.Lock()
	still, taken := n.byRef[was.Ref] == was, n.byRef[now.Ref] != nil
	n.mu.Unlock()
	switch {
	case !still:
		return nil
	case now.Ref == was.Ref:
		return n.set(now)
	case taken:
		return errors.New("there is an entry of that name")
	}
	// Two notes must not share a number, because the file could not distinguish them.
	n.mu.Lock()
	delete(n.byRef, was.Ref)
	n.mu.Unlock()
	err := n.set(now)
	if _, done := n.note(now.Ref); !done {
		n.mu.Lock()
		n.byRef[was.Ref] = was
		n.mu.Unlock()
	}
	return err
}

// amend changes the claims of the entries that match.
func (n *notes) amend(verb string, match func(Entry) bool, how func(*claim)) error {
	defer n.intact()
	if n.isClosed() {
		return os.ErrClosed
	}
	for _, e := range n.sorted(match) {
		err := n.change(e.Ref, func(now note) note {
			now.claims = slices.Clone(now.claims)
			for i := range now.claims {
				if match == nil || match(now.entry(now.claims[i])) {
					how(&now.claims[i])
				}
			}
			return now
		})
		if err != nil {
			return fmt.Errorf("%s %s %s: %w", verb, e.Ref.Kind, e.Ref.Object, err)
		}
	}
	return nil
}

// Entries returns all entries, in the order in which the knobs were first turned, and the claims on
// each knob in the order in which they were first made.
func (n *notes) Entries() (out []Entry) {
	defer n.intact()
	for _, e := range n.sorted(nil) {
		out = append(out, e.entries(nil)...)
	}
	return out
}

// Entry returns a feature's claim on a knob, or false if it has none.
func (n *notes) Entry(ref Ref, feature string) (Entry, bool) {
	for _, e := range n.Claims(ref) {
		if e.Owner.Feature == feature {
			return e, true
		}
	}
	return Entry{}, false
}

// Claims returns the claims on a knob, the earliest first. An untouched knob has none.
func (n *notes) Claims(ref Ref) []Entry {
	at, _ := n.note(ref)
	return at.entries(nil)
}

// Given returns the value that the host's owner has set for a knob: Before if fairlead wrote now,
// the current value, else now itself. It does not recognise values that an unfinished Write leaves.
func (n *notes) Given(ref Ref, now string) string {
	if at, ok := n.note(ref); ok && (now == at.Wrote || at.Prior != nil && now == *at.Prior) {
		return at.Before
	}
	return now
}

// sorted returns the notes with a matching claim, oldest first; nil matches all.
func (n *notes) sorted(match func(Entry) bool) []*note {
	n.mu.Lock()
	all := slices.AppendSeq(make([]*note, 0, len(n.byRef)), maps.Values(n.byRef))
	n.mu.Unlock()
	// Usually only few match.
	list := slices.DeleteFunc(all, func(e *note) bool {
		return !slices.ContainsFunc(e.claims, func(c claim) bool { return match == nil || match(e.entry(c)) })
	})
	slices.SortFunc(list, func(a, b *note) int { return cmp.Compare(a.seq, b.seq) })
	return list
}

func (n *notes) note(ref Ref) (note, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.byRef[ref]; e != nil {
		return *e, true
	}
	return note{}, false
}

// attributed returns the runtime that reported an owner's container.
func (n *notes) attributed(to Owner) string {
	n.mu.Lock()
	source := n.source
	n.mu.Unlock()
	if source == nil || to.Container == 0 {
		return ""
	}
	return source(to.Container)
}

// put, change and drop change the file before the memory, so an error leaves both unchanged. They
// do not write what is already there.
func (n *notes) put(e note) error {
	n.writing.Lock()
	defer n.writing.Unlock()
	return n.set(e)
}

// change replaces a note by the result of how. It drops the note if it has no claims left, and does
// nothing if there is no such note.
func (n *notes) change(ref Ref, how func(note) note) error {
	n.writing.Lock()
	defer n.writing.Unlock()
	was, ok := n.note(ref)
	if !ok {
		return nil
	}
	now := how(was)
	if len(now.claims) == 0 {
		return n.end(ref)
	}
	return n.set(now)
}

// set is put; the caller holds writing.
func (n *notes) set(e note) error {
	if was, ok := n.note(e.Ref); ok && e.same(was) {
		return nil
	}
	if e.seq == 0 {
		n.last++
		e.seq = n.last
	}
	if n.isClosed() {
		return fmt.Errorf("record in journal: %w", os.ErrClosed)
	}
	if err := n.store.add(e); err != nil {
		return fmt.Errorf("record in journal: %w", err)
	}
	n.mu.Lock()
	n.byRef[e.Ref] = &e
	n.mu.Unlock()
	n.tidy()
	return nil
}

func (n *notes) drop(ref Ref) error {
	n.writing.Lock()
	defer n.writing.Unlock()
	return n.end(ref)
}

// end is drop; the caller holds writing.
func (n *notes) end(ref Ref) error {
	e, ok := n.note(ref)
	if !ok {
		return nil
	}
	if n.isClosed() {
		return fmt.Errorf("drop from journal: %w", os.ErrClosed)
	}
	if err := n.store.drop(e.seq); err != nil {
		return fmt.Errorf("drop from journal: %w", err)
	}
	n.mu.Lock()
	delete(n.byRef, ref)
	n.mu.Unlock()
	n.tidy()
	return nil
}

// tidy bounds the size of the file; the caller holds writing. If that fails because the disk is
// full, the notes and the file stay valid, and tidy tries again after the same number of records.
func (n *notes) tidy() {
	if n.store.main.lines < max(n.untidy, slack+4*len(n.byRef)) {
		return
	}
	n.untidy = 0
	if err := n.store.rewrite(slices.Collect(maps.Values(n.byRef))); err != nil {
		n.untidy = n.store.main.lines + slack
	}
}
