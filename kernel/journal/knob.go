package journal

import "errors"

// ErrGone is returned by a Knob, wrapped or not, when its object no longer exists: a file in a
// removed cgroup, a device that was deleted, a thread that has ended. Restoring such a knob is a
// success.
var ErrGone = errors.New("object is gone")

// Ref names a Knob in words that survive the process that wrote them. Knobs of one place are never
// turned at the same time, whatever their Kind. For an Object that is an absolute path, such as a
// cgroup file, the place is its directory. For any other Object it is the text before the first
// slash, which for devices is their namespace.
type Ref struct {
	Kind   string `json:"kind"`   // selects how to open it: "file", "offload", "threaded", "kthread", ...
	Object string `json:"object"` // unique within Kind, and enough to open it again
}

// Knob is one value of host state that fairlead may change: a cgroup file, an offload of a device,
// the cgroup of a kernel thread. The packages below kernel/ implement it; no other package writes
// to the host.
type Knob interface {
	Ref() Ref
	// Read returns the current value, in the form that Write takes.
	Read() (string, error)
	// Write sets the value. Read returns the same string afterwards.
	Write(value string) error
}

// Stepwise is an optional interface of a Knob. Its Write takes several steps, so a process may be
// killed between two of them.
type Stepwise interface {
	Knob
	// Unfinished reports whether value is the result of an interrupted Write that was to
	// replace from by target. Such a value counts as our own.
	Unfinished(value, from, target string) bool
}

// Composed is an optional interface of a Knob that several features may turn at a time, for values
// that combine. On any other Knob the latest claim counts, and after it has gone the claim before.
type Composed interface {
	Knob
	// Compose returns the result of the claims of two or more features, the earliest first. It
	// does not look at the host.
	Compose(wants []string) string
}

// marked is an optional interface of a Knob with values that only fairlead writes. If such a value
// is there without an entry, the entry was lost. Turn then recreates it, and does not attribute the
// value to the host's owner.
type marked interface {
	Knob
	// Unmarked returns the value that replaces a marked one when it is undone.
	Unmarked(value string) (before string, ours bool)
}

// Exposing is an optional interface of a Knob. Its Write has to change another part of the host for
// as long as it takes, for example to make a file system writable.
type Exposing interface {
	Knob
	// Exposes returns the Ref of the Knob for that part, its value now and its value during
	// Write. The Ref is zero if Write changes nothing else.
	Exposes() (ref Ref, before, during string, err error)
}

// Owner is the feature and the container on behalf of which a knob was turned.
type Owner struct {
	Feature   string `json:"feature"`
	Container uint64 `json:"container,omitempty"` // cgroup v2 id; 0 for the host as a whole
}
