package policy

import (
	"crypto/sha256"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// Store keeps the last good Policy of a directory and, for each container, the last good value of
// each key. Its methods may be called from any goroutine.
type Store struct {
	dir   string
	now   func() time.Time
	poll  time.Duration // how often Watch looks without an event
	burst time.Duration // how long Watch waits for a writer

	reload sync.Mutex // one load at a time

	mu     sync.Mutex
	policy *Policy
	good   Kept              // the files of policy; zero: none
	digest [sha256.Size]byte // of what the last load read
	loaded bool              // the Store has loaded once
	last   map[container.ID]layer
	status Status

	trusting bool  // see TrustImages
	disks    Disks // see NameDisks

	matched []time.Time // when each rule of policy last matched a container, or came into force
	ran     time.Time   // when a container that policy could have matched was last running

	overrides map[container.ID]layer // set by hand
}

// Status is the result of the last load of a Store.
type Status struct {
	Dir         string
	Files       []string  // of the policy in force, in order of precedence
	Policies    int       // in force
	LastLoad    time.Time // when the directory was last read, with or without success
	LastSuccess time.Time // when the policy in force was read, by any Store; zero if there was none
	Err         error     // of the last load, a [Problems]; nil if it succeeded
	Idle        []Idle    // the policies without a match for an hour
	WatchErr    error     // why changes are noticed late, by polling; nil if they are not
}

// Idle is a policy of a file that matches no container.
type Idle struct {
	File  string
	Line  int
	Since time.Time // of its last match, or when it came into force
}

// idleAfter is how long a policy must match nothing to be reported.
const idleAfter = time.Hour

// NewStore makes a Store with the empty policy; Reload fills it. now is the clock for Status; nil:
// time.Now.
func NewStore(dir string, now func() time.Time) *Store {
	if now == nil {
		now = time.Now
	}
	return &Store{dir: dir, now: now, poll: 30 * time.Second, burst: time.Second, policy: &Policy{}, last: map[container.ID]layer{}, status: Status{Dir: dir}}
}

// TrustImages makes the labels of images count as their containers' own, for hosts where the
// builders of images may set policy. A container's label of the same name takes precedence. Call it
// before anything else.
func (s *Store) TrustImages() { s.trusting = true }

// own returns c with only its operator's labels.
func (s *Store) own(c container.Container) container.Container {
	if s.trusting && len(c.ImageLabels) > 0 {
		labels := maps.Clone(c.ImageLabels)
		maps.Copy(labels, c.Labels)
		c.Labels, c.ImageLabels = labels, nil
	}
	return c
}

// Reload reads the directory. If everything in it is valid, it is in force from now on. Otherwise the
// last good policy stays, even that of an earlier Store (see Recall), and the error is a [Problems]. If
// there never was a good policy, labels do not count either, because the files may deny them.
func (s *Store) Reload() error {
	_, _, err := s.load(true, aWriter)
	return err
}

// load reads the directory and reports whether it has changed. Without force, it does not parse
// unchanged content again. If the files may have a writer, by a larger value than accept, and there was
// a load, it changes nothing.
func (s *Store) load(force bool, accept writer) (news bool, found writer, err error) {
	s.reload.Lock()
	defer s.reload.Unlock()
	files, problems := readDir(s.dir)
	for _, f := range files {
		found = max(found, f.writer)
	}
	sum := digest(files, problems)

	s.mu.Lock()
	known := s.loaded && (sum == s.digest || found > accept)
	s.mu.Unlock()
	if known && !force {
		return false, found, nil
	}

	p, err := load(files, problems)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.digest, s.loaded = sum, true
	s.status.LastLoad, s.status.Err = s.now(), err
	if err == nil {
		s.use(p, files, s.status.LastLoad, s.status.LastLoad)
	} else if s.status.LastSuccess.IsZero() {
		// A file may deny labels, so none may count yet.
		s.policy = &Policy{rules: []rule{{trust: trust{deny: "the policy files are broken, and may deny labels"}}}}
		s.matched = []time.Time{s.status.LastLoad}
	}
	return !known, found, err
}

// use puts a good policy in force that was read at when. The caller holds s.mu.
func (s *Store) use(p *Policy, files []file, when, now time.Time) {
	was := s.policy.rules
	matched := make([]time.Time, len(p.rules))
	for i, r := range p.rules {
		matched[i] = now
		same := func(o rule) bool { return o.file == r.file && o.line == r.line && reflect.DeepEqual(o.match, r.match) }
		if j := slices.IndexFunc(was, same); j >= 0 && j < len(s.matched) {
			matched[i] = s.matched[j]
		}
	}
	s.policy, s.matched = p, matched
	s.status.LastSuccess, s.status.Files, s.status.Policies = when, p.Files(), p.Len()
	s.good = Kept{Dir: s.dir, When: when}
	for _, f := range files {
		s.good.Files = append(s.good.Files, keptFile{f.name, string(f.data)})
	}
}

// Kept is the last good policy as it was read, for the next Store.
type Kept struct {
	Dir   string     `json:"dir"`
	When  time.Time  `json:"when"` // of the read; zero: there was none
	Files []keptFile `json:"files"`
}

// keptFile is one policy file, in order of precedence.
type keptFile struct {
	Name string `json:"name"`
	Text string `json:"text"`
}

// Kept returns the last good policy, for the Recall of a later Store.
func (s *Store) Kept() Kept {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.good
}

// Recall puts the last good policy of an earlier Store in force, until a load succeeds. It ignores the
// policy of another directory, and returns an error for one that is no longer valid. Call it before the
// first load.
func (s *Store) Recall(k Kept) error {
	if k.Dir != s.dir || k.When.IsZero() {
		return nil
	}
	var files []file
	for _, f := range k.Files {
		files = append(files, file{name: f.Name, data: []byte(f.Text)})
	}
	p, err := load(files, nil)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.use(p, files, k.When, s.now())
	return nil
}

// Policy returns the policy in force.
func (s *Store) Policy() *Policy {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.policy
}

// Status returns the result of the last load.
func (s *Store) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.status
	for i, since := range s.matched {
		if s.ran.Sub(since) >= idleAfter {
			st.Idle = append(st.Idle, Idle{s.policy.rules[i].file, s.policy.rules[i].line, since})
		}
	}
	return st
}

// Resolve is [Policy.Resolve] with memory. The last good label of the same container and key
// replaces a broken one; values that were last in force replace contradictions. Only without such
// values does it fall back like Policy.Resolve. It drops the memory of containers that are not
// among containers.
func (s *Store) Resolve(containers []container.Container) ([]Target, []Problem) {
	s.mu.Lock()
	defer s.mu.Unlock()
	targets := make([]Target, 0, len(containers))
	var problems []Problem
	next := make(map[container.ID]layer, len(containers))
	now := s.now()
	for _, c := range sorted(containers) {
		c = s.own(c)
		held := s.policy.matching(c)
		for _, i := range held {
			s.matched[i] = now
		}
		if c.Source != container.CgroupSource {
			s.ran = now
		}
		t, ps, good := s.policy.resolve(c, held, s.last[c.ID], requested(c, s.disks), s.overrides[c.ID])
		targets, problems = append(targets, t), append(problems, ps...)
		if len(good) > 0 {
			next[c.ID] = good
		}
	}
	s.last = next
	return targets, problems
}
