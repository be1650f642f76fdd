package journal

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"
)

// notes are the entries, in the file and in memory. They know nothing of knobs.
//
// Of the two locks, writing is taken first. writing is held while the file is
// written; mu is never held while waiting for anything.
type notes struct {
	writing sync.Mutex // one change at a time; guards store, last and untidy
	store   *store
	last    uint64 // highest number given out
	untidy  int    // records before the file is rewritten, after that has failed

	mu      sync.Mutex        // guards what follows; entries change with writing held too
	entries map[Ref]*numbered // none is changed, but replaced
	closed  bool
	source  func(container uint64) string // nil: not known
}

// numbered is an Entry with its place in the order in which knobs were first
// turned. put replaces the number 0.
type numbered struct {
	Entry
	seq uint64
}

// Close releases the directory. What is in force stays in force. Afterwards
// nothing can be turned or restored (os.ErrClosed). A second Close does nothing.
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

// Extend makes the entries that match lapse at expiry (zero: never), and changes
// nothing on the host.
func (n *notes) Extend(match func(Entry) bool, expiry time.Time) error {
	return n.amend("extend", match, func(e *Entry) { e.Expiry = expiry })
}

// Reassign gives the entries that match another owner, and changes nothing on the
// host. It is for what several containers share, when the one in whose name it
// was turned ends before the others.
func (n *notes) Reassign(match func(Entry) bool, to Owner) error {
	if err := storable(to.Feature); err != nil {
		return fmt.Errorf("reassign: %w", err)
	}
	source := n.attributed(to)
	return n.amend("reassign", match, func(e *Entry) { e.Owner, e.Source = to, source })
}

// Rename replaces the Ref and the values of the entries that match by what to
// returns, and changes nothing on the host. It is for objects that somebody has
// renamed, and for values that contain such a name. It goes on after a failure.
// An entry whose new Ref another entry has keeps its own, and what is turned
// meanwhile stays as it is.
func (n *notes) Rename(match func(Entry) bool, to func(Entry) Entry) error {
	if n.isClosed() {
		return os.ErrClosed
	}
	var errs []error
	for _, e := range n.sorted(match) {
		now := to(e.Entry)
		if now == e.Entry {
			continue
		}
		err := storable(now.Ref.Kind, now.Ref.Object, now.Wrote)
		if err == nil {
			err = n.rename(e, now)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("rename %s %s to %s: %w", e.Ref.Kind, e.Ref.Object, now.Ref.Object, err))
		}
	}
	return errors.Join(errs...)
}

func (n *notes) rename(was numbered, now Entry) error {
	n.writing.Lock()
	defer n.writing.Unlock()
	if e, ok := n.entry(was.Ref); !ok || e != was {
		return nil
	}
	if now.Ref == was.Ref {
		return n.set(numbered{now, was.seq})
	}
	if _, taken := n.entry(now.Ref); taken {
		return errors.New("there is an entry of that name")
	}
	// No two entries have one number, because the file could not tell them apart.
	n.mu.Lock()
	delete(n.entries, was.Ref)
	n.mu.Unlock()
	err := n.set(numbered{now, was.seq})
	if _, done := n.entry(now.Ref); !done {
		n.mu.Lock()
		n.entries[was.Ref] = &was
		n.mu.Unlock()
	}
	return err
}

// amend changes what is noted in the entries that match.
func (n *notes) amend(verb string, match func(Entry) bool, how func(*Entry)) error {
	if n.isClosed() {
		return os.ErrClosed
	}
	for _, e := range n.sorted(match) {
		now := e.Entry
		how(&now)
		if now.Owner == e.Owner && now.Source == e.Source && now.Expiry.Equal(e.Expiry) {
			continue
		}
		if err := n.change(e.Ref, how); err != nil {
			return fmt.Errorf("%s %s %s: %w", verb, e.Ref.Kind, e.Ref.Object, err)
		}
	}
	return nil
}

// Entries lists what is recorded, in the order of first turning.
func (n *notes) Entries() []Entry { return n.list(nil) }

// Entry gives the one of a knob, or false if it is as it was found.
func (n *notes) Entry(ref Ref) (Entry, bool) {
	e, ok := n.entry(ref)
	return e.Entry, ok
}

// Expired lists the entries whose Expiry has come by now.
func (n *notes) Expired(now time.Time) []Entry {
	return n.list(func(e Entry) bool { return e.Expired(now) })
}

func (n *notes) list(match func(Entry) bool) []Entry {
	var out []Entry
	for _, e := range n.sorted(match) {
		out = append(out, e.Entry)
	}
	return out
}

// sorted gives the matching entries, oldest first; nil matches all.
func (n *notes) sorted(match func(Entry) bool) []numbered {
	n.mu.Lock()
	all := make([]*numbered, 0, len(n.entries))
	all = slices.AppendSeq(all, maps.Values(n.entries))
	n.mu.Unlock()
	// Those that match are few of many, mostly.
	var list []numbered
	for _, e := range all {
		if match == nil || match(e.Entry) {
			list = append(list, *e)
		}
	}
	slices.SortFunc(list, func(a, b numbered) int { return cmp.Compare(a.seq, b.seq) })
	return list
}

// Forget drops the entries that match without touching the host, for objects that
// have gone together with their container.
func (n *notes) Forget(match func(Entry) bool) error {
	if n.isClosed() {
		return os.ErrClosed
	}
	var errs []error
	for _, e := range n.sorted(match) {
		errs = append(errs, n.drop(e.Ref))
	}
	return errors.Join(errs...)
}

func (n *notes) entry(ref Ref) (numbered, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.entries[ref]; e != nil {
		return *e, true
	}
	return numbered{}, false
}

// attributed returns which runtime reported an owner's container.
func (n *notes) attributed(to Owner) string {
	n.mu.Lock()
	source := n.source
	n.mu.Unlock()
	if source == nil || to.Container == 0 {
		return ""
	}
	return source(to.Container)
}

// put, change and drop change the file first and the memory second: an error
// leaves both as they were.
func (n *notes) put(e numbered) error {
	n.writing.Lock()
	defer n.writing.Unlock()
	return n.set(e)
}

// change is put of an entry that is there; of one that is not it does nothing.
func (n *notes) change(ref Ref, how func(*Entry)) error {
	n.writing.Lock()
	defer n.writing.Unlock()
	e, ok := n.entry(ref)
	if !ok {
		return nil
	}
	how(&e.Entry)
	return n.set(e)
}

// set is put; the caller holds writing.
func (n *notes) set(e numbered) error {
	if e.seq == 0 {
		n.last++
		e.seq = n.last
	}
	if n.isClosed() {
		return fmt.Errorf("record in journal: %w", os.ErrClosed)
	}
	if err := n.store.add(e.seq, e.Entry); err != nil {
		return fmt.Errorf("record in journal: %w", err)
	}
	n.mu.Lock()
	n.entries[e.Ref] = &e
	n.mu.Unlock()
	n.tidy()
	return nil
}

func (n *notes) drop(ref Ref) error {
	n.writing.Lock()
	defer n.writing.Unlock()
	e, ok := n.entry(ref)
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
	delete(n.entries, ref)
	n.mu.Unlock()
	n.tidy()
	return nil
}

// tidy keeps the file from growing without bound; the caller holds writing. If
// that fails (the disk is full), the notes stay valid and so does the file; tidy
// tries again after the same number of records.
func (n *notes) tidy() {
	if n.store.lines < max(n.untidy, slack+4*len(n.entries)) {
		return
	}
	all := make(map[uint64]Entry, len(n.entries))
	for _, e := range n.entries {
		all[e.seq] = e.Entry
	}
	n.untidy = 0
	if err := n.store.rewrite(all); err != nil {
		n.untidy = n.store.lines + slack
	}
}
