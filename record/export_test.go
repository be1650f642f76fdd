package record

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// export exports to a file of its own.
func export(t *testing.T, from string, c Choice) (string, Exported) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "out")
	out, err := os.Create(path)
	must(t, err)
	defer out.Close()
	done, err := open(t, from).Export(out, c)
	must(t, err)
	return path, done
}

func TestExport(t *testing.T) {
	dir := t.TempDir()
	c := &clock{wall: epoch}
	h := newHost(5)
	w := newWriter(t, c.config(dir))
	var want []api.Frame
	for range keyEvery + 40 {
		c.pass(time.Second)
		f := h.next(time.Second)
		write(t, w, f)
		want = append(want, f)
	}
	from := want[10].Taken
	path, done := export(t, dir, Choice{From: from})
	if done.Frames != len(want)-10 || !done.First.Equal(from) || !done.Last.Equal(want[len(want)-1].Taken) || done.Damaged != 0 {
		t.Errorf("%+v", done)
	}
	got, errs := read(t, path, time.Time{}, time.Time{})
	if diff := cmp.Diff(want[10:], got); diff != "" || errs != nil {
		t.Errorf("errors %v, frames (-want +got):\n%s", errs, diff)
	}
	for _, i := range []int{0, keyEvery - 1, keyEvery, keyEvery + 7} { // a part
		part := want[10+i : 12+i]
		got, errs := read(t, path, part[0].Taken, part[1].Taken)
		if diff := cmp.Diff(part, got); diff != "" || errs != nil {
			t.Errorf("from frame %d: errors %v, frames (-want +got):\n%s", i, errs, diff)
		}
	}
	// One broken frame costs no more than what is left until the next one in full.
	f, err := openFile(path)
	must(t, err)
	defer f.Close()
	must(t, f.readBlocks())
	data, err := os.ReadFile(path)
	must(t, err)
	data[f.blocks[20].at] ^= 1
	must(t, os.WriteFile(path, data, 0o600))
	got, errs = read(t, path, time.Time{}, time.Time{})
	if len(errs) != 1 || len(got) != done.Frames-keyEvery+20 {
		t.Errorf("%d frames of %d, errors %v", len(got), done.Frames, errs)
	}
}

// fill gives every field in a value a content that is its own, and those that must not get out one that
// is easy to find: texts, and numbers of processes, namespaces and containers. It returns these.
func fill(v reflect.Value, name string, list *[]string) {
	secret := func(form string) string {
		s := fmt.Sprintf(form, len(*list))
		*list = append(*list, s)
		return s
	}
	n := len(*list) + 1
	if v.Type() == reflect.TypeFor[api.ID]() || name == "NetNS" || name == "PID" || name == "VNI" {
		n += 40265318401234
		*list = append(*list, fmt.Sprint(n))
	}
	switch {
	case v.Type() == reflect.TypeFor[time.Time]():
		v.Set(reflect.ValueOf(epoch.Add(time.Duration(n))))
	case v.Kind() == reflect.Bool:
		v.SetBool(true)
	case v.Kind() == reflect.Int:
		v.SetInt(int64(n))
	case v.Kind() == reflect.Uint64:
		v.SetUint(uint64(n))
	case v.Kind() == reflect.Float64:
		v.SetFloat(1 / float64(n))
	case v.Kind() == reflect.String:
		v.SetString(secret("secret<%d>\x1b[2J"))
	case v.Kind() == reflect.Map:
		v.Set(reflect.ValueOf(map[string]string{secret("secret<%d>key"): secret("/srv/secret<%d>")}))
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), name, list)
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), name, list)
		}
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), v.Type().Field(i).Name, list)
		}
	}
}

// filled returns a frame of which no field is zero.
func filled() (f api.Frame, hidden []string) {
	fill(reflect.ValueOf(&f).Elem(), "", &hidden)
	return f, hidden
}

// TestAnonymous looks for every text of frames in which every field has one, and those of a host, in
// what is exported.
func TestAnonymous(t *testing.T) {
	dir := t.TempDir()
	c := &clock{wall: epoch}
	w := newWriter(t, c.config(dir))
	f, hidden := filled()
	for range 3 {
		write(t, w, f)
	}
	h := newHost(6)
	hidden = append(hidden, "db-1", "flood", "cart-0", "postgres", "registry", "example", "evil", "held back", "web-", "eth0", "vda")
	for range 3 {
		write(t, w, h.next(time.Second))
	}
	if len(hidden) < 300 {
		t.Fatalf("only %d texts", len(hidden))
	}
	path, done := export(t, dir, Choice{Anonymous: true, Words: []string{"fairlead.net.rate", "fairlead.netcpu"}})
	if done.Frames != 6 {
		t.Fatalf("%+v", done)
	}
	whole := contents(t, path)
	for _, s := range hidden {
		if bytes.Contains(whole, []byte(s)) {
			t.Errorf("%q is in the file", s)
		}
	}
	// What it is for is there: the same names for the same containers, and what policy asks for.
	got, errs := read(t, path, time.Time{}, time.Time{})
	if errs != nil {
		t.Fatal(errs)
	}
	one, two := got[3], got[5]
	for i, c := range two.Containers {
		if !strings.HasPrefix(c.Name, "container-") || c.Name != one.Containers[i].Name || c.ID != one.Containers[i].ID {
			t.Errorf("container %d is %q, was %q", i, c.Name, one.Containers[i].Name)
		}
	}
	testkit.Same(t, "policy", []api.Setting{{Key: "fairlead.net.rate", Value: "50mbit", From: "label"}}, two.Containers[5].Policy)
	// The original has them: the test would find them.
	if path, _ := export(t, dir, Choice{}); !bytes.Contains(contents(t, path), []byte(hidden[0])) {
		t.Error("the text is not found in a file that has it")
	}
}

// contents returns the bytes of a file, and those of its blocks without compression.
func contents(t *testing.T, path string) []byte {
	t.Helper()
	all, err := os.ReadFile(path)
	must(t, err)
	f, err := openFile(path)
	must(t, err)
	defer f.Close()
	must(t, f.readBlocks())
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
	must(t, err)
	defer z.Close()
	d := reading{z: z}
	for _, b := range f.blocks {
		must(t, d.block(f, b))
		all = append(all, d.raw...)
	}
	return all
}

// TestAnonymousLeavesFrames checks that the frames that are read stay as they are.
func TestAnonymousLeavesFrames(t *testing.T) {
	f, _ := filled()
	same, _ := filled()
	newAnonymous(nil).frame(f)
	testkit.Same(t, "frame", same, f)
}
