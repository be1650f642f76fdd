package api

import "testing"

// The last line of doctor names what works, and one thing to do.
func TestSummary(t *testing.T) {
	feature := func(name string, l Level, mend string) Finding {
		return Finding{Capability: name, Area: AreaFeatures, Verdict: Verdict{Level: l, Why: "of " + name, Mend: mend}}
	}
	uplink := Finding{Capability: "eth0", Area: "uplink", Verdict: Verdict{Level: LevelDegraded, Why: "no rate", Mend: "give it"}}
	podman := Finding{Capability: "podman", Area: "runtime", Verdict: Verdict{Level: LevelUnavailable, Why: "not here", Mend: "start it"}}
	for _, tt := range []struct {
		report Report
		want   string
	}{
		{Report{podman}, "nothing works here, and nothing more would help."},
		{Report{podman, feature("a", LevelFull, "")}, "a works here, and nothing more would help."},
		{Report{feature("a", LevelFull, ""), feature("b", LevelDegraded, "none is needed"), feature("c", LevelFull, "")}, "a, b and c work here, and nothing more would help."},
		{Report{feature("a", LevelDegraded, "more memory"), uplink}, "a works here; what would help most: give it (eth0: no rate)."},
		{Report{feature("a", LevelDegraded, "more memory"), feature("b", LevelFull, "")}, "a and b work here; what would help most: more memory (a: of a)."},
		{Report{podman, feature("a", LevelFull, ""), feature("b", LevelUnavailable, "root"), uplink}, "a works here, b not; what would help most: root (b: of b)."},
		{Report{feature("a", LevelUnavailable, "root"), feature("b", LevelUnavailable, "BTF")}, "nothing works here; what would help most: root (a: of a)."},
	} {
		if got := tt.report.Summary(); got != tt.want {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}
