package journal

import "errors"

// ErrGone is returned by a Knob, wrapped or not, whose object no longer
// exists: a file in a removed cgroup, a device that was deleted, a thread that
// has ended. Restoring such a knob is a success.
var ErrGone = errors.New("object is gone")

// Ref names a Knob in words that survive the process that wrote them.
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

// Owner says on whose behalf a knob was turned.
type Owner struct {
	Feature   string `json:"feature"`
	Container uint64 `json:"container,omitempty"` // cgroup v2 id; 0 for the host as a whole
}
