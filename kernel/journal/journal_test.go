package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const boot = "0b5b1f1e-5f5e-4b5c-9a53-8d3e6a1f4c11"

// board is a set of knobs in memory that can be made to fail.
type board struct {
	mu     sync.Mutex
	values map[string]string
	fail   map[string]error  // Write of this object fails
	round  map[string]string // Write of this object stores this other value
	writes int
}

func newBoard(kv ...string) *board {
	b := &board{values: map[string]string{}, fail: map[string]error{}, round: map[string]string{}}
	for i := 0; i < len(kv); i += 2 {
		b.values[kv[i]] = kv[i+1]
	}
	return b
}

func (b *board) open(r Ref) (Knob, error) {
	if r.Kind != "mem" {
		return nil, fmt.Errorf("unknown kind %q", r.Kind)
	}
	return b.knob(r.Object), nil
}

func (b *board) knob(name string) Knob { return memKnob{b, name} }

func (b *board) set(name, value string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.values[name] = value
}

func (b *board) get(name string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.values[name]
}

type memKnob struct {
	b    *board
	name string
}

func (k memKnob) Ref() Ref { return Ref{Kind: "mem", Object: k.name} }

func (k memKnob) Read() (string, error) {
	k.b.mu.Lock()
	defer k.b.mu.Unlock()
	v, ok := k.b.values[k.name]
	if !ok {
		return "", fmt.Errorf("read %s: %w", k.name, ErrGone)
	}
	return v, nil
}

func (k memKnob) Write(v string) error {
	k.b.mu.Lock()
	defer k.b.mu.Unlock()
	if err := k.b.fail[k.name]; err != nil {
		return err
	}
	if _, ok := k.b.values[k.name]; !ok {
		return ErrGone
	}
	if r, ok := k.b.round[k.name]; ok && v != k.b.values[k.name] {
		v = r
	}
	k.b.writes++
	k.b.values[k.name] = v
	return nil
}

func open(t *testing.T, dir string) *Journal {
	t.Helper()
	j := testkit.Opened(openBoot(dir, "", boot))(t)
	return j
}

func turn(t *testing.T, j *Journal, k Knob, v string) {
	t.Helper()
	must(t, j.Turn(k, v, Owner{Feature: "test"}))
}

// brief renders entries as "object: before>wrote" with "(prior)" where there is one.
func brief(list []Entry) string {
	var parts []string
	for _, e := range list {
		s := e.Ref.Object + ":" + e.Before + ">" + e.Wrote
		if e.Prior != nil {
			s += "(" + *e.Prior + ")"
		}
		parts = append(parts, s)
	}
	return strings.Join(parts, " ")
}

// lapsed returns the entries that have expired by a time.
func lapsed(j *Journal, at time.Time) []Entry {
	return slices.DeleteFunc(j.Entries(), func(e Entry) bool { return !e.Expired(at) })
}

func results(out []Outcome) string {
	var parts []string
	for _, o := range out {
		parts = append(parts, fmt.Sprintf("%s:%s", o.Entry.Ref.Object, o.Result))
	}
	return strings.Join(parts, " ")
}

func TestTurn(t *testing.T) {
	cases := []struct {
		name  string
		steps string // "v" turns to v, "=v" is another program's write
		value string
		want  string // entries after
		after string // value after Restore
		res   string
	}{
		{"equal writes and records nothing", "1", "1", "", "1", ""},
		{"one turn", "2", "2", "a:1>2", "1", "a:restored"},
		{"second turn keeps the first before", "2 3", "3", "a:1>3", "1", "a:restored"},
		{"back to before drops", "2 3 1", "1", "", "1", ""},
		{"same again", "2 2", "2", "a:1>2", "1", "a:restored"},
		{"foreign edit is left alone", "2 =7", "7", "a:1>2", "7", "a:foreign"},
		{"foreign edit back to before", "2 =1", "1", "a:1>2", "1", "a:unchanged"},
		{"turn over a foreign edit restores that", "2 =7 3", "3", "a:7>3", "7", "a:restored"},
		{"turn to before over a foreign edit restores that", "2 =7 1", "1", "a:7>1", "7", "a:restored"},
		{"turn over a foreign reset keeps before", "2 =1 3", "3", "a:1>3", "1", "a:restored"},
		{"foreign edit to what we want is not ours", "2 =3 3", "3", "", "3", ""},
		{"before ordered and there already", "2 =1 1", "1", "", "1", ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			b := newBoard("a", "1")
			j := open(t, t.TempDir())
			for _, s := range strings.Fields(c.steps) {
				if v, foreign := strings.CutPrefix(s, "="); foreign {
					b.set("a", v)
				} else {
					turn(t, j, b.knob("a"), s)
				}
			}
			testkit.Same(t, "value", c.value, b.get("a"))
			testkit.Same(t, "entries", c.want, brief(j.Entries()))
			out, err := j.Restore(b.open, nil)
			testkit.Check(t, err)
			testkit.Same(t, "outcome", c.res, results(out))
			testkit.Same(t, "restored to", c.after, b.get("a"))
			testkit.Same(t, "entries are left", "", brief(j.Entries()))
		})
	}
}

func TestTurnAgainMovesTheExpiry(t *testing.T) {
	b := newBoard("a", "1", "b", "2")
	dir := t.TempDir()
	j := open(t, dir)
	soon := time.Date(2026, 3, 4, 5, 6, 7, 0, time.FixedZone("CET", 3600))
	for _, expiry := range []time.Time{soon, soon.Add(time.Minute)} {
		for _, name := range []string{"a", "b"} {
			must(t, j.TurnUntil(b.knob(name), "2", Owner{Feature: "test"}, expiry))
		}
		if got := lapsed(j, expiry); len(got) != 1 || got[0].Ref.Object != "a" {
			t.Errorf("expired: %v", got)
		}
		testkit.None(t, "expired early", lapsed(j, expiry.Add(-1)))
	}
	turn(t, j, b.knob("a"), "2") // now without expiry
	j.Close()
	testkit.None(t, "expired", lapsed(open(t, dir), soon.Add(time.Hour)))
	testkit.Same(t, "writes", 1, b.writes)
}

func TestTurnFailure(t *testing.T) {
	refused := errors.New("refused")
	for _, c := range []struct {
		name    string
		setup   func(*board)
		is      error
		value   string
		entries string
	}{
		{"first write refused", func(b *board) { b.fail["a"] = refused }, refused, "1", ""},
		{"rounded value is put back", func(b *board) { b.round["a"] = "8" }, nil, "", ""},
		{"gone", func(b *board) { delete(b.values, "a") }, ErrGone, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBoard("a", "1")
			c.setup(b)
			j := open(t, t.TempDir())
			err := j.Turn(b.knob("a"), "9", Owner{Feature: "test"})
			if err == nil || c.is != nil && !errors.Is(err, c.is) {
				t.Fatalf("error is %v, want %v", err, c.is)
			}
			if c.value != "" && b.get("a") != c.value {
				t.Errorf("value is %q, want %q", b.get("a"), c.value)
			}
			// The rounding board also rounds the value that is put back: then the entry
			// must stay.
			if got := brief(j.Entries()); got != c.entries && b.get("a") == "1" {
				t.Errorf("entries are %q, want %q", got, c.entries)
			}
		})
	}

	t.Run("what cannot be stored is refused before the host changes", func(t *testing.T) {
		b := newBoard("a", "1", "\xff", "1")
		j := open(t, t.TempDir())
		for name, value := range map[string]string{"a": "\xff", "\xff": "2"} {
			testkit.Fails(t, fmt.Sprintf("turn %q to %q", name, value), j.Turn(b.knob(name), value, Owner{}))
		}
		testkit.Fails(t, "long value", j.Turn(b.knob("a"), strings.Repeat("x", maxText+1), Owner{}))
		if b.writes != 0 || len(j.Entries()) != 0 {
			t.Errorf("%d writes, entries %q", b.writes, brief(j.Entries()))
		}
	})
}

// After a crash between the record and the write of a second Turn, the value of the first is in
// force: it is still ours.
func TestPriorIsOurs(t *testing.T) {
	b := newBoard("a", "1")
	dir := t.TempDir()
	j := open(t, dir)
	turn(t, j, b.knob("a"), "2")
	e := *j.byRef[Ref{"mem", "a"}]
	prior := "2"
	e.Wrote, e.Prior = "3", &prior
	must(t, j.put(e))
	j.Close()

	j = open(t, dir)
	if got := brief(j.Entries()); got != "a:1>3(2)" {
		t.Fatalf("entries are %q", got)
	}
	turn(t, j, b.knob("a"), "2") // in force already: only the entry is corrected
	testkit.Same(t, "entries", "a:1>2", brief(j.Entries()))
	must(t, j.put(e))
	out, err := j.Restore(b.open, nil)
	if err != nil || results(out) != "a:restored" || b.get("a") != "1" {
		t.Errorf("restore: %v, %v, value %q", results(out), err, b.get("a"))
	}
}

func TestEntriesSurviveReopening(t *testing.T) {
	b := newBoard("a", "1", "b", "x\n\t\"<é>")
	dir := t.TempDir()
	j := open(t, dir)
	when := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	j.now = func() time.Time { return when }
	must(t, j.TurnUntil(b.knob("a"), "2", Owner{"netcpu", 42}, when.Add(time.Minute)))
	must(t, j.Turn(b.knob("b"), "", Owner{"netcpu", 43}))
	want := []Entry{
		{Ref: Ref{"mem", "a"}, Before: "1", Wrote: "2", Value: "2", Owner: Owner{"netcpu", 42}, When: when, Expiry: when.Add(time.Minute)},
		{Ref: Ref{"mem", "b"}, Before: "x\n\t\"<é>", Wrote: "", Owner: Owner{"netcpu", 43}, When: when},
	}
	testkit.Same(t, "Entries", want, j.Entries())
	j.Close()
	j = open(t, dir)
	testkit.Same(t, "Entries", want, j.Entries(), cmpopts.EquateApproxTime(0))
	testkit.Same(t, "expired early", "", brief(lapsed(j, when.Add(59*time.Second))))
	testkit.Same(t, "expired", "a:1>2", brief(lapsed(j, when.Add(time.Minute))))
	gone := func(Ref) (Knob, error) { return nil, ErrGone }
	must(t, testkit.Err(j.Restore(gone, func(e Entry) bool { return e.Owner.Container == 42 })))
	if len(j.Entries()) != 1 || b.get("a") != "2" {
		t.Errorf("after the end of a: %q, value %q", brief(j.Entries()), b.get("a"))
	}
	turn(t, j, b.knob("a"), "5") // a number must not be given out twice
	testkit.Same(t, "entries", "b:x\n\t\"<é>> a:2>5", brief(j.Entries()))
}

func TestOtherBootIsDropped(t *testing.T) {
	b := newBoard("a", "1")
	dir := t.TempDir()
	j := open(t, dir)
	turn(t, j, b.knob("a"), "2")
	j.Close()
	// After a loss of power the file may contain anything: it must not be read at all.
	ruin(t, dir, func([]byte) []byte { return []byte{0, 0, 0} })

	j, err := openBoot(dir, "", "11111111-5f5e-4b5c-9a53-8d3e6a1f4c11")
	must(t, err)
	defer j.Close()
	testkit.Same(t, "entries of another boot: "+brief(j.Entries()), 0, len(j.Entries()))
	names, _ := filepath.Glob(filepath.Join(dir, "*"))
	if len(names) != 1 {
		t.Errorf("left in the directory: %q", names)
	}
}

func TestBootID(t *testing.T) {
	proc := t.TempDir()
	testkit.Is(t, "no file", testkit.Err(BootID(proc)), os.ErrNotExist)
	os.MkdirAll(filepath.Join(proc, "sys/kernel/random"), 0o755)
	os.WriteFile(filepath.Join(proc, "sys/kernel/random/boot_id"), []byte(boot+"\n"), 0o644)
	if got, err := BootID(proc); err != nil || got != boot {
		t.Errorf("got %q, %v", got, err)
	}
	for _, bad := range []string{"", "../x", "A", strings.Repeat("a", 65)} {
		if j, err := openBoot(t.TempDir(), "", bad); err == nil {
			j.Close()
			t.Errorf("boot id %q was taken", bad)
		}
	}
}

func TestDirectoryMode(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "state")
	open(t, dir)
	for name, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, prefix+boot): 0o600} {
		info, err := os.Stat(name)
		must(t, err)
		testkit.Same(t, "mode of "+name, want, info.Mode().Perm())
	}
}

func TestClosed(t *testing.T) {
	b := newBoard("a", "1")
	dir := t.TempDir()
	j := open(t, dir)
	turn(t, j, b.knob("a"), "2")
	j.Close()
	open(t, dir)
	_, err := j.Restore(b.open, nil)
	for call, err := range map[string]error{
		"turn": j.Turn(b.knob("a"), "3", Owner{}), "restore": err, "extend": j.Extend(nil, time.Now()),
		"reassign": j.Reassign(nil, Owner{}), "rename": j.Rename(nil, nil),
	} {
		testkit.Is(t, call, err, os.ErrClosed)
	}
	testkit.Same(t, "value", "2", b.get("a"))
}

func TestConcurrentUse(t *testing.T) {
	dir := t.TempDir()
	b := newBoard()
	const knobs, turns = 8, 30
	for i := range knobs {
		b.set(fmt.Sprint("k", i), "0")
	}
	j := open(t, dir)
	var wg sync.WaitGroup
	for i := range knobs {
		for w := range 2 {
			wg.Go(func() {
				for n := range turns {
					testkit.Check(t, j.Turn(b.knob(fmt.Sprint("k", i)), fmt.Sprint(w*1000+n+1), Owner{Feature: "test", Container: uint64(i)}))
					j.Entries()
				}
			})
		}
	}
	wg.Wait()
	testkit.Same(t, "entries", knobs, len(j.Entries()))
	testkit.Check(t, testkit.Err(j.Restore(b.open, nil)))
	for name, v := range b.values {
		testkit.Same(t, name, "0", v)
	}
}
