package api

import (
	"fmt"
	"slices"
	"strings"
)

// Level grades a capability of the host.
type Level string

// The levels. A capability that could not be tried is LevelUnavailable, with the reason why
// it could not.
const (
	LevelFull        Level = "full"
	LevelDegraded    Level = "degraded"
	LevelUnavailable Level = "unavailable"
)

// Verdict says whether the host has a capability, in words that a user can act on.
type Verdict struct {
	Level Level  `json:"level"`
	Why   string `json:"why,omitempty"`  // for LevelDegraded and LevelUnavailable: the reason
	Mend  string `json:"mend,omitempty"` // what would make it LevelFull, where anything would
}

// Mendable reports whether anything would make it better that is worth the trouble.
func (v Verdict) Mendable() bool {
	return v.Level != LevelFull && v.Mend != "" && !strings.HasPrefix(v.Mend, noMend)
}

// noMend begins the Mend of what does no harm.
const noMend = "none is needed"

// Finding is the answer to one question about the host.
type Finding struct {
	Capability string `json:"capability"` // unique; it stays the same from version to version
	Area       string `json:"area"`       // one of HostAreas, AreaFeatures, or one that a feature chose
	Verdict
	Detail string `json:"detail,omitempty"` // what was seen
}

// AreaFeatures is the Area of how the features stand, each of which is a capability.
const AreaFeatures = "feature"

// HostAreas are the Areas of the questions that every agent asks about its host.
func HostAreas() []string {
	return []string{"host", "cgroup", "sched", "bpf", "net", "runtime", "owner"}
}

// Report lists what a host can do: the questions about the host first, then the features.
type Report []Finding

// Summary says in one sentence which features work, and what would help most: for a
// feature that does not work, then for what a feature found out, then for one that
// works with a fault. The other findings are reasons of these.
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

// and lists words in a sentence.
func and(words []string) string {
	last := len(words) - 1
	if last < 1 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " and " + words[last]
}
