package probe

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
	Level Level
	Why   string // for Degraded and Unavailable: the reason
	Mend  string // what would make it Full, where anything would
}
