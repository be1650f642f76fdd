package journal

import "errors"

// ErrGone is returned by a Knob, wrapped or not, whose object no longer
// exists: a file in a removed cgroup, a device that was deleted, a thread that
// has ended. Restoring such a knob is a success.
var ErrGone = errors.New("object is gone")

// Ref names a Knob in words that survive the process that wrote them. Knobs of one
// place are never turned at the same time, of whatever Kind: the place is the
// directory where Object is an absolute path, as that of a cgroup file, else what
// comes before its first slash, which for devices is their namespace.
type Ref struct {
	Kind   string `json:"kind"`   // which door opens it: "file", "offload", "threaded", "kthread", ...
	Object string `json:"object"` // unique within Kind, and enough to open it again
}

// Knob is one value of host state that fairlead may change: a cgroup file, an
// offload of a device, the cgroup of a kernel thread. The packages below
// kernel/ implement it; nothing else writes to the host.
type Knob interface {
	Ref() Ref
	// Read gives the value now, in the form that Write takes.
	Read() (string, error)
	// Write sets the value. After it, Read gives back the same string.
	Write(value string) error
}

// Stepwise is a Knob whose Write takes several steps, so that a process may be
// killed between two of them. A Knob need not be one.
type Stepwise interface {
	Knob
	// Unfinished says whether value is what an interrupted Write of target, in place
	// of from, leaves behind. Such a value counts as our own.
	Unfinished(value, from, target string) bool
}

// Composed is a Knob that several features may turn at a time, for values that go
// together. A Knob need not be one: then the latest claim counts, and the one before
// again when that has gone.
type Composed interface {
	Knob
	// Compose gives what the claims of two or more features come to, the earliest
	// first. It does not look at the host.
	Compose(wants []string) string
}

// Exposing is a Knob whose Write has to change something else on the host for as
// long as it takes, such as to make a file system writable. A Knob need not be one.
type Exposing interface {
	Knob
	// Exposes gives the Knob that names that, with the value that it has now and
	// the one that it has during Write; the Ref is zero where Write changes
	// nothing else.
	Exposes() (ref Ref, before, during string, err error)
}

// Owner says on whose behalf a knob was turned.
type Owner struct {
	Feature   string `json:"feature"`
	Container uint64 `json:"container,omitempty"` // cgroup v2 id; 0 for the host as a whole
}
