package probe

import "strings"

// Level grades a capability of this host.
type Level string

// The three answers that a probe can give. A probe that could not be made is
// Unavailable, with the reason why it could not.
const (
	Full        Level = "full"
	Degraded    Level = "degraded"
	Unavailable Level = "unavailable"
)

// Verdict is what a probe found out, in words that a user can act on.
type Verdict struct {
	Level Level  `json:"level"`
	Why   string `json:"why,omitempty"`  // for Degraded and Unavailable: the reason
	Mend  string `json:"mend,omitempty"` // what would make it Full, where anything would
}

// Mendable says whether anything would make it better that is worth the trouble.
func (v Verdict) Mendable() bool {
	return v.Level != Full && v.Mend != "" && !strings.HasPrefix(v.Mend, noMend)
}

// noMend begins the Mend of what does no harm.
const noMend = "none is needed"
