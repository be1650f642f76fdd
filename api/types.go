// Package api lets programs query and command an agent. It contains the wire types and the client,
// version 1, and imports no other package of fairlead. Package agent/serve is the server, with the
// routes and the OpenAPI document. The CLI, bench and the views use [Client] only.
//
// Of fairlead's packages only this one promises stability: fields are added, but never renamed or
// given another meaning. The exceptions are [Ask] and the types of its Body, which the server and
// the features share.
//
// Strings that come from containers (names, images, labels) are untrusted. JSON carries them
// unchanged, so whatever prints them must quote them.
package api

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Default paths and addresses of an agent.
const (
	DefaultSocket     = "/run/fairlead/fairlead.sock"
	DefaultSelfSocket = "/run/fairlead/self.sock"
)

// ViewSocket returns the path of the read-only socket beside an agent's socket. A [Client] uses it
// if it may not connect to the agent's.
func ViewSocket(socket string) string { return strings.TrimSuffix(socket, ".sock") + "-view.sock" }

// Group is the group whose members may use the agent's socket. If the host lacks it, only root may.
const Group = "fairlead"

// The states of a feature for one container, in FeatureStatus.State.
const (
	StatePending     = "pending"     // not applied yet, or being applied again
	StateDone        = "done"        // the host matches policy
	StatePartly      = "partly"      // in force as far as this host supports it: some of what policy asks for is not covered
	StateError       = "error"       // the last attempt failed and will be repeated
	StateHeld        = "held"        // undone by restore; until the next policy reload
	StateKept        = "kept"        // as an earlier agent left it, until the container's runtime answers
	StateUnavailable = "unavailable" // this host does not support it
)

// The states of a journal entry, in Change.State.
const (
	ChangeInForce = "in force" // the value is what fairlead wrote
	ChangeUndone  = "undone"   // the value is the original one again
	ChangeForeign = "foreign"  // another program has changed the value since
	ChangeGone    = "gone"     // the object no longer exists
	ChangeUnknown = "unknown"  // the value could not be read
)

// Container is one container that the agent sees, and its state.
type Container struct {
	ID          ID                `json:"id,string" doc:"cgroup v2 id, in decimal; unique until the next boot"`
	Name        string            `json:"name" doc:"name that the runtime gave, in a pod NAMESPACE/POD/NAME; without a runtime, the last element of the cgroup's path"`
	Source      string            `json:"source" doc:"who knows it best: docker, podman, containerd, cri-o, sandbox, cgroup"`
	RuntimeID   string            `json:"runtime_id,omitempty" doc:"the runtime's own id"`
	Image       string            `json:"image,omitempty" doc:"image reference as the runtime gives it"`
	ImageNames  []string          `json:"image_names,omitempty" doc:"names of the image, where image is its id or has a digest"`
	Labels      map[string]string `json:"labels,omitempty" doc:"labels, with CRI annotations merged in"`
	Pod         string            `json:"pod,omitempty" doc:"Kubernetes pod name"`
	Namespace   string            `json:"namespace,omitempty" doc:"Kubernetes namespace"`
	PID         int               `json:"pid,omitempty" doc:"init process, in the agent's pid namespace"`
	Started     time.Time         `json:"started,omitzero" doc:"start of the init process"`
	Cgroup      Cgroup            `json:"cgroup" doc:"directories of the container's control groups"`
	NetNS       uint64            `json:"netns,omitempty,string" doc:"inode of the network namespace; containers with the same one are one network tenant"`
	HostNetwork bool              `json:"host_network,omitempty" doc:"it uses the agent's own network namespace"`
	Interfaces  []Interface       `json:"interfaces" doc:"network devices of the container, without lo"`
	Many        bool              `json:"many_interfaces,omitempty" doc:"it has more network devices or addresses than are looked at; those that lead to the host come first"`
	Policy      []Setting         `json:"policy" doc:"every value that policy sets for it, sorted by key"`
	Features    []FeatureStatus   `json:"features" doc:"how each feature stands with it"`
}

// Cgroup holds the directories of a container's control groups. Empty: the controller is not
// mounted.
type Cgroup struct {
	V2     string `json:"v2,omitempty" doc:"cgroup v2 directory"`
	CPU    string `json:"cpu,omitempty" doc:"directory with the cpu controller"`
	CPUSet string `json:"cpuset,omitempty" doc:"directory with the cpuset controller"`
	IO     string `json:"io,omitempty" doc:"directory with the io (v2) or blkio (v1) controller"`
}

// Interface is a network device of a container.
type Interface struct {
	Name  string   `json:"name" doc:"name inside the container"`
	Index int      `json:"index" doc:"interface index inside the container"`
	Kind  string   `json:"kind" doc:"as the kernel names it: veth, macvlan, ipvlan"`
	MAC   string   `json:"mac,omitempty" doc:"hardware address"`
	Addrs []string `json:"addrs,omitempty" doc:"addresses in CIDR form"`
	Host  *HostEnd `json:"host,omitempty" doc:"where its other end lies; absent if it has none that can be seen"`
}

// HostEnd is the other end of a container's veth.
type HostEnd struct {
	NetNS  uint64 `json:"netns,omitempty,string" doc:"inode of the network namespace that it lies in"`
	Name   string `json:"name" doc:"name there"`
	Index  int    `json:"index" doc:"interface index there"`
	Master string `json:"master,omitempty" doc:"bridge that it is a port of"`
}

// Setting is one value of policy, and its origin.
type Setting struct {
	Key   string `json:"key" doc:"policy key, such as fairlead.netcpu"`
	Value string `json:"value" doc:"value as written"`
	From  string `json:"from,omitempty" doc:"label, annotation, request of (resources), controller, set by (who, and when), or the path of the policy file"`
	Line  int    `json:"line,omitempty" doc:"line in the policy file"`

	Instead string    `json:"instead,omitempty" doc:"of a controller: what policy says there"`
	Reason  string    `json:"reason,omitempty" doc:"of a controller: why it decided so"`
	Since   time.Time `json:"since,omitzero" doc:"of a controller: since when"`
}

// FeatureStatus is the state of one feature for one container.
type FeatureStatus struct {
	Feature string    `json:"feature" doc:"name of the feature"`
	State   string    `json:"state" doc:"pending, done, partly, error, held, kept or unavailable"`
	Asked   bool      `json:"asked,omitempty" doc:"policy or a decision asks it for something for the container"`
	Error   string    `json:"error,omitempty" doc:"what went wrong at the last try, or why the feature is unavailable or the state kept"`
	Tries   int       `json:"tries,omitempty" doc:"failed tries in a row"`
	Since   time.Time `json:"since,omitzero" doc:"when the state was entered"`
	Next    time.Time `json:"next,omitzero" doc:"when it is tried again"`
}

// Change is a change of host state that is in the journal, with the present value, read for this
// answer.
type Change struct {
	Container ID        `json:"container,omitempty,string" doc:"id of the container on whose behalf; absent for the host as a whole"`
	Feature   string    `json:"feature" doc:"feature that made the change"`
	Kind      string    `json:"kind" doc:"kind of object: file, offload, threaded, kthread, affinity"`
	Object    string    `json:"object" doc:"which object"`
	Device    string    `json:"device,omitempty" doc:"name of the network device that the object belongs to; absent if there is none, or its name is not known"`
	Before    string    `json:"before" doc:"value before the first change"`
	Wrote     string    `json:"wrote" doc:"value that fairlead wrote: what all features together come to that have changed it"`
	Asked     string    `json:"asked,omitempty" doc:"value that this feature asks for, where that is another"`
	Now       string    `json:"now" doc:"value read for this answer"`
	State     string    `json:"state" doc:"in force, undone, foreign, gone or unknown"`
	Error     string    `json:"error,omitempty" doc:"why the value could not be read"`
	When      time.Time `json:"when,omitzero" doc:"when the change was made"`
	Expiry    time.Time `json:"expiry,omitzero" doc:"when it lapses; absent if it holds until policy changes"`
	Because   []Setting `json:"because,omitempty" doc:"the policy that asked for it"`
}

// Explanation lists what fairlead has done to one container, and why.
type Explanation struct {
	Container Container `json:"container" doc:"the container"`
	Ended     bool      `json:"ended,omitempty" doc:"the container has ended; what is left of it is shown"`
	Changes   []Change  `json:"changes" doc:"what was changed on the host for it, oldest first"`
	Host      []Change  `json:"host,omitempty" doc:"what was changed for the host as a whole"`
	Problems  []Problem `json:"problems,omitempty" doc:"policy for it that could not be used"`

	Evidence []Evidence `json:"evidence,omitempty" doc:"what features have seen of it that led to decisions, about it or others; the latest last"`
}

// Evidence is one observation of a feature about a container.
type Evidence struct {
	Feature string    `json:"feature" doc:"the feature"`
	Time    time.Time `json:"time" doc:"when"`
	Text    string    `json:"text" doc:"what, in a sentence"`
}

// Planned is one value that a feature would write on the host for a container.
type Planned struct {
	Feature string  `json:"feature" doc:"feature that would write it"`
	Because Setting `json:"because" doc:"the policy under which it would"`
	Kind    string  `json:"kind" doc:"kind of object, as of a change"`
	Object  string  `json:"object" doc:"which object; napi/DEVICE is a thread that does not exist yet"`
	Device  string  `json:"device,omitempty" doc:"name of the network device, as of a change"`
	Now     string  `json:"now" doc:"value read for this answer"`
	Value   string  `json:"value" doc:"value that it would have"`
}

// Problem is a part of policy that is invalid, with its place and the reason.
type Problem struct {
	Container ID     `json:"container,omitempty,string" doc:"id of the container that it concerns; absent for a file"`
	Text      string `json:"text" doc:"place and reason"`
}

// Status is the state of the agent.
type Status struct {
	Version    Version        `json:"version" doc:"what runs"`
	Started    time.Time      `json:"started" doc:"when the agent started"`
	Complete   bool           `json:"complete" doc:"every source has given its list at least once"`
	Containers int            `json:"containers" doc:"containers that run now"`
	Sources    []SourceStatus `json:"sources" doc:"where containers are learned from"`
	Policy     PolicyStatus   `json:"policy" doc:"policy in force"`
	Features   []Feature      `json:"features" doc:"the features, in the order in which they are shown"`
	Changes    int            `json:"changes" doc:"changes of host state in the journal"`
	Rounds     uint64         `json:"rounds" doc:"reconcile rounds since start"`
	Held       []string       `json:"held,omitempty" doc:"ids of containers that restore has let go of until the next policy reload"`
	Recording  *Recording     `json:"recording,omitempty" doc:"what the agent records on disk; absent if it does not"`
	HeldAll    bool           `json:"held_all,omitempty" doc:"restore has let go of all containers until the next policy reload"`
}

// Recording is the state of the agent's recording.
type Recording struct {
	Dir        string  `json:"dir" doc:"folder of the recording"`
	Bytes      uint64  `json:"bytes" doc:"size of the recording on disk"`
	Frames     uint64  `json:"frames" doc:"frames that were written since the agent started"`
	FrameBytes uint64  `json:"frame_bytes" doc:"bytes of these frames"`
	CPU        float64 `json:"cpu_seconds" doc:"CPU time of writing them, in seconds"`
	Failed     uint64  `json:"failed_frames,omitempty" doc:"frames that could not be written"`
	Error      string  `json:"error,omitempty" doc:"why the last frame could not be written; absent if it was"`
}

// SourceStatus is the state of one source of containers.
type SourceStatus struct {
	Name       string `json:"name" doc:"name of the source"`
	Ready      bool   `json:"ready" doc:"it has given its list"`
	Containers int    `json:"containers" doc:"containers that it reports"`
	Partial    bool   `json:"partial,omitempty" doc:"containers may run that are not in its list: the runtime is not there or has not answered about them yet, so that what it said before counts, or there are more of them, or more changes, than it takes up"`
	Error      string `json:"error,omitempty" doc:"why its list may be out of date or not the whole, or of how many containers it should tell and does not, and what to set"`
}

// PolicyStatus describes the policy in force.
type PolicyStatus struct {
	Dir      string    `json:"dir" doc:"folder of the policy files"`
	Files    []string  `json:"files,omitempty" doc:"policy files in force, in order of precedence"`
	Loaded   time.Time `json:"loaded,omitzero" doc:"when the policy in force was loaded, maybe by an earlier agent; absent: there is none, and labels do not count either"`
	Tried    time.Time `json:"tried,omitzero" doc:"when loading was last tried"`
	OK       bool      `json:"ok" doc:"the last try succeeded; if not, the last good policy is still in force, if there is one"`
	Error    string    `json:"error,omitempty" doc:"why the last try did not succeed: file, line and reason"`
	Watch    string    `json:"watch,omitempty" doc:"why changes of the folder are noticed late"`
	Problems []Problem `json:"problems,omitempty" doc:"policy of containers that cannot be used"`
	Idle     []Idle    `json:"idle,omitempty" doc:"policies of files that have matched no container for an hour, though some ran"`
}

// Idle is a policy in a file that matches no container.
type Idle struct {
	File  string    `json:"file" doc:"path of the policy file"`
	Line  int       `json:"line" doc:"line in it"`
	Since time.Time `json:"since" doc:"when it last matched a container, or began to be in force"`
}

// Feature is the state of one feature on this host.
type Feature struct {
	Name    string  `json:"name" doc:"name of the feature"`
	Support Verdict `json:"support" doc:"whether this host can do it"`
	Done    int     `json:"done" doc:"containers for which the host is as policy wants it"`
	Partly  int     `json:"partly,omitempty" doc:"containers for which a part of what policy asks for is not covered here"`
	Pending int     `json:"pending" doc:"containers that wait for it"`
	Failed  int     `json:"failed" doc:"containers for which the last try failed"`
	Prune   string  `json:"prune,omitempty" doc:"why what an earlier agent left could not be removed yet"`
}

// Samples holds the measurements of the features.
type Samples struct {
	Features []FeatureSamples `json:"features" doc:"one element for each feature"`
}

// FeatureSamples holds the measurements of one feature at one moment.
type FeatureSamples struct {
	Feature string    `json:"feature" doc:"name of the feature"`
	Taken   time.Time `json:"taken" doc:"when the counters were read"`
	Samples []Sample  `json:"samples" doc:"the numbers"`
}

// Sample is one number about one container, or about the host.
type Sample struct {
	Container ID      `json:"container,omitempty,string" doc:"id of the container; absent for the host"`
	Name      string  `json:"name" doc:"name of the metric without the prefix fairlead_, in base units"`
	Device    string  `json:"device,omitempty" doc:"device, where the number belongs to one"`
	Labels    []Label `json:"labels,omitempty" doc:"what else tells the number from others of the same name"`
	Value     float64 `json:"value" doc:"the number"`
}

// Label is one property of a Sample: a word, or another container.
type Label struct {
	Name      string `json:"name" doc:"name of the property"`
	Value     string `json:"value,omitempty" doc:"the property as a word; absent where it is a container"`
	Container ID     `json:"container,omitempty,string" doc:"id of the container that it is"`
}

// Version is the version of an agent and its API.
type Version struct {
	Version string `json:"version" doc:"version of the program"`
	Commit  string `json:"commit,omitempty" doc:"commit that it was built from"`
	Go      string `json:"go" doc:"version of the Go toolchain"`
	API     string `json:"api" doc:"version of this interface"`
	Kernel  string `json:"kernel,omitempty" doc:"release of the running kernel"`
}

// RestoreRequest is the body of a request to restore.
type RestoreRequest struct {
	Container string `json:"container,omitempty" doc:"name of one container, or id:NUMBER; absent for all and the host"`
}

// SetRequest is the body of a request to set values by hand.
type SetRequest struct {
	Set   map[string]string `json:"set,omitempty" doc:"values by policy key, with or without the prefix fairlead., as in a label"`
	Unset []string          `json:"unset,omitempty" doc:"keys whose values, set by hand, are taken back: files and labels count again"`
	Was   map[string]string `json:"was,omitempty" doc:"values that policy must give the keys now, empty for none; else nothing is changed"`
}

// Restored lists the outcomes of the changes that a restore was to undo.
type Restored struct {
	Container ID        `json:"container,omitempty,string" doc:"id of the container that was restored; absent for all and the host"`
	Name      string    `json:"name,omitempty" doc:"its name"`
	Source    string    `json:"source,omitempty" doc:"who knows it best, as of a container"`
	Outcomes  []Outcome `json:"outcomes" doc:"one element for each change, newest first"`
}

// Outcome is the outcome of undoing one change.
type Outcome struct {
	Container ID     `json:"container,omitempty,string" doc:"id of the container on whose behalf it was made"`
	Feature   string `json:"feature" doc:"feature that made the change"`
	Kind      string `json:"kind" doc:"kind of object"`
	Object    string `json:"object" doc:"which object"`
	Device    string `json:"device,omitempty" doc:"name of the network device that the object belongs to; absent if there is none, or its name is not known"`
	Result    string `json:"result" doc:"restored, released (other features keep it changed), unchanged (it was as before already), gone, foreign (somebody else has changed it: left alone) or failed"`
	Before    string `json:"before,omitempty" doc:"value from before fairlead"`
	Wrote     string `json:"wrote,omitempty" doc:"value that fairlead wrote"`
	Now       string `json:"now,omitempty" doc:"value that was found, where it was neither"`
	Error     string `json:"error,omitempty" doc:"what went wrong"`
}

// Self is what a container may know about itself. It contains nothing about other containers, and
// no path of the host.
type Self struct {
	ID       ID               `json:"id,string" doc:"cgroup v2 id, in decimal"`
	Name     string           `json:"name" doc:"the runtime's name for it"`
	Policy   []Setting        `json:"policy" doc:"what policy sets for it"`
	Features []FeatureStatus  `json:"features" doc:"how each feature stands with it"`
	Measured []FeatureSamples `json:"measured" doc:"what the features measured of it"`
	SelfReports
}

// Error is why a request failed. As a Go error, it is Text.
type Error struct {
	Status int    `json:"status" doc:"HTTP status"`
	Code   string `json:"code" doc:"short name for programs: bad_request, not_found, ambiguous, forbidden, refused, not_measured, unavailable, internal"`
	Text   string `json:"text" doc:"what is wrong, for people"`
}

// Error implements error.
func (e *Error) Error() string { return e.Text }

// Failure is the body of every answer that is not 2xx.
type Failure struct {
	Error Error `json:"error" doc:"what is wrong"`
}

// Ask is a request to a feature.
type Ask struct {
	Feature   string        // name of the feature
	Container string        // id, runtime id or name of one container; "": all
	Over      time.Duration // time to measure first; 0: do not measure
	Self      bool          // the container itself asks
	Body      any           // a command, or the type that the route declares for its parameters; else nil
}

// MaxOver is the longest time for which an agent measures for one request.
const MaxOver = 30 * time.Second

// ID identifies a container: the inode number of its cgroup v2 directory. It is unique until the
// next boot. 0 is no container. In JSON it is a decimal string.
type ID uint64

// String returns the ID in decimal.
func (id ID) String() string { return strconv.FormatUint(uint64(id), 10) }

// IDPrefix marks a reference to a container as an id, even if a container has such a name.
const IDPrefix = "id:"

// Ref returns the reference that means only the container with an id.
func Ref(id ID) string { return IDPrefix + id.String() }

// Level grades a capability of the host.
type Level string

// The levels. A capability that could not be tested is LevelUnavailable, and the verdict gives the
// reason.
const (
	LevelFull        Level = "full"
	LevelDegraded    Level = "degraded"
	LevelUnavailable Level = "unavailable"
)

// Verdict says whether the host has a capability, in words that help a user to act.
type Verdict struct {
	Level Level  `json:"level"`
	Why   string `json:"why,omitempty"`  // for LevelDegraded and LevelUnavailable: the reason
	Mend  string `json:"mend,omitempty"` // what would make it LevelFull, where anything would
}

// Mendable reports whether there is a remedy that is worth the trouble.
func (v Verdict) Mendable() bool {
	return v.Level != LevelFull && v.Mend != "" && !strings.HasPrefix(v.Mend, noMend)
}

// noMend is the start of Mend if the lack does no harm.
const noMend = "none is needed"

// Finding is the answer to one question about the host.
type Finding struct {
	Capability string `json:"capability"` // unique; it stays the same from version to version
	Area       string `json:"area"`       // one of HostAreas, AreaFeatures, or one that a feature chose
	Verdict
	Detail string `json:"detail,omitempty"` // what was seen
}

// AreaFeatures is the Area of the features themselves, each of which is a capability.
const AreaFeatures = "feature"

// HostAreas returns the Areas that every agent probes.
func HostAreas() []string {
	return []string{"host", "cgroup", "sched", "bpf", "net", "runtime", "owner"}
}

// Report lists what a host can do: findings about the host first, then about the features.
type Report []Finding

// Summary says in one sentence which features work, and what would help most: first for a feature
// that does not work, then for a finding of a feature, then for a feature that works in part. The
// other findings are the reasons for these.
func (r Report) Summary() string {
	var works, not []string
	var most *Finding
	rank := func(f *Finding) int {
		switch {
		case !f.Mendable():
			return 0
		case f.Area == AreaFeatures && f.Level == LevelUnavailable:
			return 3
		case f.Area == AreaFeatures:
			return 1
		case !slices.Contains(HostAreas(), f.Area):
			return 2
		}
		return 0
	}
	best := 0
	for i := range r {
		f := &r[i]
		if f.Area == AreaFeatures && f.Level == LevelUnavailable {
			not = append(not, f.Capability)
		} else if f.Area == AreaFeatures {
			works = append(works, f.Capability)
		}
		if n := rank(f); n > best {
			best, most = n, f
		}
	}
	var s string
	switch {
	case len(works) == 0:
		s = "nothing works here"
	case len(not) == 0:
		s = and(works) + " work here"
	default:
		s = and(works) + " work here, " + and(not) + " not"
	}
	if len(works) == 1 {
		s = strings.Replace(s, " work ", " works ", 1)
	}
	if most == nil {
		return s + ", and nothing more would help."
	}
	return fmt.Sprintf("%s; what would help most: %s (%s: %s).", s, most.Mend, most.Capability, most.Why)
}

// and joins words into a list for a sentence.
func and(words []string) string {
	last := len(words) - 1
	if last < 1 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " and " + words[last]
}
