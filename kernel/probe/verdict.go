package probe

// Level grades a capability of this host.
type Level string

// The three levels. A trial that could not be made is Unavailable, with the reason.
const (
	Full        Level = "full"
	Degraded    Level = "degraded"
	Unavailable Level = "unavailable"
)

// Verdict is the result of a probe, in words that a user can act on.
type Verdict struct {
	Level Level
	Why   string // for Degraded and Unavailable: the reason
	Mend  string // what would make it Full, if anything would
}
