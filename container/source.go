package container

import "context"

// Source reports the containers that one runtime, or one part of the host, knows
// of. An absent runtime is not an error: its source reports an empty list, and
// keeps looking for it.
type Source interface {
	// Name is the Source field of the containers that it reports.
	Name() string
	// Run watches until ctx ends. It calls publish with the whole list, once as
	// soon as it is known and again whenever it has changed. It re-lists now and
	// then, because events get lost, and it reconnects by itself. A Report with
	// Err says that the list is unknown at present; the Set then keeps the last
	// one.
	Run(ctx context.Context, publish func(Report)) error
}

// Report is the whole list of one Source, or the reason why there is none.
type Report struct {
	Records []Record
	Err     error

	// Partial says that containers of this runtime may run that are not in
	// Records: the runtime is not there to report them, or has not yet answered
	// about some that it lists.
	Partial bool
}

// Record is what a runtime knows of one container. The Set finds out the rest
// from PID (or, if that is 0, from CgroupV2): the cgroups, the network
// namespace and the interfaces.
type Record struct {
	PID       int
	CgroupV2  string // absolute path; only where the source knows no PID
	Name      string
	RuntimeID string
	Image     string
	Labels    map[string]string // without those in ImageLabels
	Pod       string
	Namespace string

	ImageLabels map[string]string // see Container
	ImageNames  []string          // see Container
	PodCgroup   string            // name of the directory that the CRI made for the pod alone, "" if it did not

	LeftOut map[string]int // see Container; the Set fills it in

	Annotations map[string]bool // see Container
	// Sandbox says that it only holds the namespaces of a pod: its cgroup is known to
	// the runtime, and it is no container of its own.
	Sandbox bool
}
