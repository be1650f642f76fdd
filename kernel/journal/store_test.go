package journal

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// ruin changes the journal file below dir.
func ruin(t *testing.T, dir string, change func([]byte) []byte) {
	t.Helper()
	name := filepath.Join(dir, prefix+boot)
	data, err := os.ReadFile(name)
	must(t, err)
	must(t, os.WriteFile(name, change(data), 0o600))
}

func TestCorruptFileIsSetAside(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func([]byte) []byte
		kept   string
	}{
		{"empty", func([]byte) []byte { return nil }, ""},
		{"zeros", func(b []byte) []byte { return make([]byte, len(b)) }, ""},
		{"no header", func(b []byte) []byte { return b[len(header):] }, "a:1>2 b:1>2"},
		{"garbage in the middle", func(b []byte) []byte {
			i := bytes.LastIndexByte(b[:len(b)-1], '\n') + 1
			return append(append(bytes.Clone(b[:i]), "\xffgarbage\n\n"...), b[i:]...)
		}, "a:1>2 b:1>2"},
		{"another value", func(b []byte) []byte { return bytes.Replace(b, []byte(`"before":"1"`), []byte(`"before":"9"`), 1) }, "b:1>2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBoard("a", "1", "b", "1")
			dir := t.TempDir()
			j := open(t, dir)
			turn(t, j, b.knob("a"), "2")
			turn(t, j, b.knob("b"), "2")
			j.Close()
			ruin(t, dir, c.change)

			j, err := openBoot(dir, "", boot)
			if err == nil {
				j.Close()
			}
			aside := filepath.Join(dir, prefix+boot+".corrupt")
			if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), aside) {
				t.Fatalf("error is %v", err)
			}
			testkit.Check(t, testkit.Err(os.Stat(aside)))
			j = open(t, dir) // goes on with the intact lines
			testkit.Same(t, "kept", c.kept, brief(j.Entries()))
		})
	}
}

// What the file has lost, by damage or with its directory, comes from the copy, and each of the two
// is whole again afterwards. An entry that was undone stays undone.
func TestCopy(t *testing.T) {
	for name, change := range map[string]func([]byte) []byte{
		"zeroed":           func(b []byte) []byte { return make([]byte, len(b)) },
		"cut to half":      func(b []byte) []byte { return b[:len(b)/2] },
		"one line damaged": func(b []byte) []byte { return bytes.Replace(b, []byte(`"before":"1"`), []byte(`"before":"9"`), 1) },
		"removed":          nil,
	} {
		for _, which := range []string{"journal", "copy"} {
			t.Run(name+"/"+which, func(t *testing.T) {
				b := newBoard("a", "1", "b", "1", "c", "1")
				dir, second := t.TempDir(), filepath.Join(t.TempDir(), "made")
				j, err := openBoot(dir, second, boot)
				must(t, err)
				turn(t, j, b.knob("a"), "2")
				turn(t, j, b.knob("c"), "2")
				turn(t, j, b.knob("b"), "2")
				turn(t, j, b.knob("c"), "1")
				j.Close()
				at := map[string]string{"journal": dir, "copy": second}[which]
				if change == nil {
					must(t, os.Remove(filepath.Join(at, prefix+boot)))
				} else {
					ruin(t, at, change)
				}
				j, err = openBoot(dir, second, boot)
				if which == "journal" {
					if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "copy") {
						t.Fatalf("error is %v", err)
					}
					j, err = openBoot(dir, second, boot)
				}
				must(t, err)
				j.Close()
				for _, one := range []string{dir, second} {
					j = open(t, one)
					if got, want := brief(j.Entries()), "a:1>2 b:1>2"; got != want {
						t.Errorf("%s has %q afterwards, want %q", one, got, want)
					}
				}
			})
		}
	}
}

// A copy that cannot be written is given up, and is not found later.
func TestNoCopy(t *testing.T) {
	b := newBoard("a", "1", "b", "1")
	dir, second := t.TempDir(), t.TempDir()
	j, err := openBoot(dir, second, boot)
	must(t, err)
	turn(t, j, b.knob("a"), "2")
	must(t, j.store.copy.open.Close())
	turn(t, j, b.knob("b"), "2")
	testkit.Is(t, "the old copy is still there", testkit.Err(os.Stat(filepath.Join(second, prefix+boot))), os.ErrNotExist)
	j.Close()
	must(t, os.RemoveAll(second))
	must(t, os.WriteFile(second, nil, 0o600)) // no directory
	j, err = openBoot(dir, second, boot)
	must(t, err)
	defer j.Close()
	testkit.Same(t, "entries", "a:1>2 b:1>2", brief(j.Entries()))
}

// A process that is killed in the middle of a write leaves a truncated last line. The change that
// the line was to announce has not been made yet.
func TestLastLineCutShort(t *testing.T) {
	b := newBoard("a", "1", "b", "1")
	dir := t.TempDir()
	j := open(t, dir)
	turn(t, j, b.knob("a"), "2")
	turn(t, j, b.knob("b"), "2")
	j.Close()
	whole, err := os.ReadFile(filepath.Join(dir, prefix+boot))
	must(t, err)
	for n := len(header); n < len(whole); n++ {
		want := map[int]string{1: "", 2: "a:1>2"}[bytes.Count(whole[:n], []byte("\n"))]
		ruin(t, dir, func([]byte) []byte { return whole[:n] })
		j, err := openBoot(dir, "", boot)
		if err != nil {
			t.Fatalf("%d of %d bytes: %v", n, len(whole), err)
		}
		testkit.Same(t, fmt.Sprintf("%d of %d bytes: kept", n, len(whole)), want, brief(j.Entries()))
		j.Close()
	}
}

func TestBusy(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir)
	testkit.Is(t, "second open", testkit.Err(openBoot(dir, "", boot)), ErrBusy)
	j.Close()
	open(t, dir)
}

func TestFileStaysShort(t *testing.T) {
	b := newBoard("a", "0", "b", "0")
	dir := t.TempDir()
	j := open(t, dir)
	turn(t, j, b.knob("b"), "x")
	for i := range 3 * slack {
		turn(t, j, b.knob("a"), fmt.Sprint("v", i))
	}
	if j.store.main.lines > slack+8 {
		t.Errorf("%d lines", j.store.main.lines)
	}
	j.Close()
	j = open(t, dir)
	if got, want := brief(j.Entries()), fmt.Sprintf("b:0>x a:0>v%d", 3*slack-1); got != want {
		t.Errorf("entries are %q, want %q", got, want)
	}
	turn(t, j, b.knob("a"), "w") // the file has its greatest length
	if j.store.main.lines > slack+8 {
		t.Errorf("%d lines after opening", j.store.main.lines)
	}
}

// Open refuses a journal in another release's format, and leaves it as it is.
func TestVersion(t *testing.T) {
	for _, other := range []string{"1", "3", "12 beta"} {
		b := newBoard("a", "1")
		dir := t.TempDir()
		j := open(t, dir)
		turn(t, j, b.knob("a"), "2")
		j.Close()
		var was []byte
		ruin(t, dir, func(data []byte) []byte {
			was = append([]byte(magic+other+"\n"), data[len(header):]...)
			return was
		})
		_, err := openBoot(dir, "", boot)
		if !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), fmt.Sprintf("form %q", other)) {
			t.Errorf("form %s: %v", other, err)
		}
		if now, err := os.ReadFile(filepath.Join(dir, prefix+boot)); err != nil || !bytes.Equal(now, was) {
			t.Errorf("form %s: the file has changed (%v)", other, err)
		}
	}
}

// TestFullDisk fills the file system that holds the journal: opening and undoing need no room, and
// a new change is refused before it is made.
func TestFullDisk(t *testing.T) {
	testkit.NeedRoot(t)
	dir := t.TempDir()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	b := newBoard("a", "1", "b", "1", "c", "1")
	j := open(t, dir)
	turn(t, j, b.knob("a"), "2")
	turn(t, j, b.knob("b"), "2")
	j.Close()
	if err := os.WriteFile(filepath.Join(dir, "fill"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill the file system: %v", err)
	}

	j = open(t, dir)
	var err error
	for i := 0; i < 100 && err == nil; i++ { // the rest of the file's last page
		err = j.Turn(b.knob("c"), fmt.Sprint(i), Owner{Feature: "test"})
	}
	if was := b.get("c"); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("turn on a full disk: %v, and c is %s", err, was)
	}
	testkit.Is(t, "restore on a full disk", testkit.Err(j.Restore(b.open, nil)), nil)
	if b.get("a") != "1" || b.get("b") != "1" || b.get("c") != "1" {
		t.Errorf("after restore: a, b, c are %s, %s, %s", b.get("a"), b.get("b"), b.get("c"))
	}
	j.Close()
	testkit.Same(t, "left in the journal", "", brief(open(t, dir).Entries()))
}

func FuzzParse(f *testing.F) {
	good := []byte(header)
	for n, obj := range []string{"/sys/fs/cgroup/cpu/x/cpu.shares", "b", "b"} {
		e := Entry{Ref: Ref{"file", obj}, Before: "1024", Wrote: "512", Owner: Owner{"netcpu", 7}}
		line, err := format(record{N: uint64(n), Entry: &e, With: []record{{Entry: &Entry{Owner: Owner{"blockio", 7}}, Value: &obj}, {}}})
		must(f, err)
		good = append(good, line...)
	}
	none, _ := format(record{N: 1})
	f.Add(good)
	f.Add(append(bytes.Clone(good), none...))
	ended := bytes.Clone(good)
	ended[len(header)] = dropped
	f.Add(ended)
	f.Add(good[:len(good)/2])
	f.Add([]byte{})
	f.Add([]byte(header + "00000000 \n"))
	f.Add([]byte(header + "\n\n"))
	at, err := readClock()
	must(f, err)
	lapses, _ := format(record{N: 9, Entry: &Entry{Ref: Ref{"file", "c"}, Expiry: at.now}, Lapses: 5})
	f.Add(append(bytes.Clone(good), lapses...))
	whole := cmp.AllowUnexported(note{})
	f.Fuzz(func(t *testing.T, data []byte) {
		entries, l, damage := parse(data, at)
		if damage != nil {
			return
		}
		for n, e := range entries { // drop overwrites the line of this entry
			line, _, _ := bytes.Cut(data[l.at[n]:], []byte("\n"))
			if r, err := parseLine(line); err != nil || r.N != n || !cmp.Equal(r.note(at), e, whole) {
				t.Fatalf("entry %d is not at %d: %v", n, l.at[n], err)
			}
		}
		again := []byte(header)
		for _, e := range entries {
			line, err := format(recordOf(e, at))
			if err != nil {
				t.Fatalf("parsed but does not format: %v", err)
			}
			again = append(again, line...)
		}
		back, _, damage := parse(again, at)
		if damage != nil {
			t.Fatalf("formatted but does not parse: %v", damage)
		}
		if diff := cmp.Diff(entries, back, whole); diff != "" {
			t.Fatal(diff)
		}
	})
}

// The entries stay valid even if the file cannot be made shorter.
func TestCannotTidy(t *testing.T) {
	b := newBoard("a", "0")
	dir := t.TempDir()
	j := open(t, dir)
	testkit.Must(t, os.Mkdir(j.store.main.path+".new", 0o700))
	last := ""
	for i := range slack {
		last = fmt.Sprint(i + 1)
		turn(t, j, b.knob("a"), last)
	}
	if j.store.main.lines < slack {
		t.Fatalf("%d lines: it was made shorter", j.store.main.lines)
	}
	want := "a:0>" + last
	testkit.Same(t, "entries", want, brief(j.Entries()))
	must(t, os.Remove(j.store.main.path+".new"))
	for i := range slack {
		turn(t, j, b.knob("a"), fmt.Sprint(-i))
	}
	if j.store.main.lines > 2*slack {
		t.Errorf("%d lines: it was not tried again", j.store.main.lines)
	}
	j.Close()
	if got, want := brief(open(t, dir).Entries()), fmt.Sprint("a:0>", 1-slack); got != want {
		t.Errorf("entries are %q, want %q", got, want)
	}
}
