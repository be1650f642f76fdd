package journal

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// least is a knob that is set to the least value claimed.
type least struct{ Knob }

func (least) Compose(wants []string) string { return slices.Min(wants) }

// claims renders entries as "object: before>wrote" with each feature's claim.
func claims(list []Entry) string {
	var parts []string
	for i, e := range list {
		if i == 0 || list[i-1].Ref != e.Ref {
			parts = append(parts, brief([]Entry{e}))
		}
		parts = append(parts, e.Owner.Feature+"="+e.Value)
	}
	return strings.Join(parts, " ")
}

// Each feature takes back its claim independently. The value from before comes back with the last
// claim, also after a kill at any step.
func TestClaims(t *testing.T) {
	cases := []struct {
		name  string
		least bool
		steps string // "A5": A turns to 5; "-A": A takes back its claim; "=7": another program writes
		value string // value after these steps
		want  string // what the journal records
		after string // the value without any claim
	}{
		{"the latest counts", false, "A5 B3", "3", "a:9>3 A=5 B=3", "9"},
		{"the earlier one comes back", false, "A5 B3 -B", "5", "a:9>5 A=5", "9"},
		{"the earlier one goes first", false, "A5 B3 -A", "3", "a:9>3 B=3", "9"},
		{"a second turn keeps its place", false, "A5 B3 A4", "3", "a:9>3 A=4 B=3", "9"},
		{"and counts later", false, "A5 B3 A4 -B", "4", "a:9>4 A=4", "9"},
		{"turning to before is letting go", false, "A5 B3 B9", "5", "a:9>5 A=5", "9"},
		{"both let go", false, "A5 B3 -A -B", "9", "", "9"},
		{"the same value", false, "A5 B5 -A", "5", "a:9>5 B=5", "9"},
		{"the least counts", true, "A3 B5", "3", "a:9>3 A=3 B=5", "9"},
		{"and then the other", true, "A3 B5 -A", "5", "a:9>5 B=5", "9"},
		{"in whatever order", true, "B5 A3 -B B6 -A", "6", "a:9>6 B=6", "9"},
		{"three", true, "A3 B5 C4 -A -C", "5", "a:9>5 B=5", "9"},
		{"somebody else's stays", true, "A3 B5 =7", "7", "a:9>3 A=3 B=5", "7"},
		{"and is what a claim holds for from then on", true, "A3 B5 =7 A3", "3", "a:7>3 A=3 B=5", "7"},
		{"a claim on somebody else's value is none", true, "A3 =7 A7 B5", "5", "a:7>5 B=5", "7"},
		{"somebody else puts back before", true, "A3 B5 =9 B6", "3", "a:9>3 A=3 B=6", "9"},
	}
	for _, c := range cases {
		for _, killed := range []bool{false, true} {
			t.Run(fmt.Sprint(c.name, ", killed ", killed), func(t *testing.T) {
				b := newBoard("a", "9")
				knob := func() Knob {
					if c.least {
						return least{b.knob("a")}
					}
					return b.knob("a")
				}
				opener := func(Ref) (Knob, error) { return knob(), nil }
				dir := t.TempDir()
				j := open(t, dir)
				for _, s := range strings.Fields(c.steps) {
					var err error
					switch s[0] {
					case '=':
						b.set("a", s[1:])
					case '-':
						_, err = j.Restore(opener, func(e Entry) bool { return e.Owner.Feature == s[1:] })
					default:
						err = j.Turn(knob(), s[1:], Owner{Feature: s[:1]})
					}
					if err != nil {
						t.Fatalf("%s: %v", s, err)
					}
					if killed {
						j.Close()
						j = open(t, dir)
					}
				}
				testkit.Same(t, "the value", c.value, b.get("a"))
				testkit.Same(t, "noted", c.want, claims(j.Entries()))
				if _, err := j.Restore(opener, nil); err != nil || b.get("a") != c.after || len(j.Entries()) != 0 {
					t.Errorf("in the end it is %q, want %q; %v; %s", b.get("a"), c.after, err, claims(j.Entries()))
				}
			})
		}
	}
}

// A claim lapses by itself, and renewing one changes no other.
func TestClaimsLapse(t *testing.T) {
	b := newBoard("a", "9")
	dir := t.TempDir()
	j := open(t, dir)
	soon, late := time.Now().Add(time.Minute), time.Now().Add(time.Hour)
	for by, at := range map[string]time.Time{"A": soon, "B": late, "C": {}} {
		must(t, j.TurnUntil(least{b.knob("a")}, map[string]string{"A": "3", "B": "5", "C": "6"}[by], Owner{Feature: by}, at))
	}
	expired := func(at time.Time) (by string) {
		for _, e := range lapsed(j, at) {
			by += e.Owner.Feature
		}
		return by
	}
	for _, want := range []string{"A", "B", ""} {
		j.Close()
		j = open(t, dir)
		at := map[string]time.Time{"A": soon, "B": late, "": late.Add(24 * time.Hour)}[want].Add(time.Second)
		testkit.Same(t, "lapse", want, expired(at))
		out, err := j.Restore(func(Ref) (Knob, error) { return least{b.knob("a")}, nil }, func(e Entry) bool { return e.Expired(at) })
		if value := map[string]string{"A": "5", "B": "6", "": "6"}[want]; err != nil || b.get("a") != value || want != "" && results(out) != "a:released" {
			t.Errorf("%q lapsed: %q, %s, %v", want, b.get("a"), results(out), err)
		}
	}
	if err := j.Extend(func(e Entry) bool { return e.Owner.Feature == "C" }, soon); err != nil || expired(soon) != "C" {
		t.Errorf("%v; %q lapse", err, expired(soon))
	}
}

// Given returns the value that the host's owner has set, whatever claims are in force.
func TestGiven(t *testing.T) {
	b := newBoard("a", "9")
	j := open(t, t.TempDir())
	k := least{b.knob("a")}
	turn := func(by, value string) error { return j.Turn(k, value, Owner{Feature: by}) }
	given := func() string { return j.Given(k.Ref(), b.get("a")) }
	testkit.Same(t, "before any claim", "9", given())
	if err := errors.Join(turn("A", "3"), turn("B", "5"), turn("A", "9")); err != nil || given() != "9" || b.get("a") != "5" {
		t.Errorf("%v: %s of %s", err, b.get("a"), given())
	}
	b.set("a", "7")
	testkit.Same(t, "by somebody else", "7", given())
	if err := j.TurnGiven(k, "9", "3", Owner{Feature: "A"}, time.Time{}); !errors.Is(err, ErrChanged) || b.get("a") != "7" {
		t.Errorf("%v; it is %s", err, b.get("a"))
	}
	if err := j.TurnGiven(k, "7", "3", Owner{Feature: "A"}, time.Time{}); err != nil || b.get("a") != "3" || given() != "7" {
		t.Errorf("%v: %s of %s", err, b.get("a"), given())
	}
}

// A failed write leaves the other claims unchanged and in force.
func TestClaimRefused(t *testing.T) {
	refused := errors.New("refused")
	b := newBoard("a", "9")
	j := open(t, t.TempDir())
	k := least{b.knob("a")}
	must(t, errors.Join(j.Turn(k, "5", Owner{Feature: "A"}), j.Turn(k, "6", Owner{Feature: "B"})))
	b.fail["a"] = refused
	opener := func(Ref) (Knob, error) { return k, nil }
	out, err := j.Restore(opener, func(e Entry) bool { return e.Owner.Feature == "A" })
	_, last := j.Restore(opener, nil)
	for _, err := range []error{err, last, j.Turn(k, "3", Owner{Feature: "B"}), j.Turn(k, "3", Owner{Feature: "C"})} {
		if got := claims(j.Entries()); !errors.Is(err, refused) || got != "a:9>5 A=5 B=6" {
			t.Errorf("%v: %s", err, got)
		}
	}
	testkit.Same(t, "outcome", "a:failed", results(out))
	delete(b.values, "a")
	if out, err := j.Restore(opener, func(e Entry) bool { return e.Owner.Feature == "A" }); err != nil || results(out) != "a:gone" || len(j.Entries()) != 0 {
		t.Errorf("%s, %v, %s", results(out), err, claims(j.Entries()))
	}
}
