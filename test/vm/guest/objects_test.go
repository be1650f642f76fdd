package guest

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// mostVerified limits the instructions that the verifier may process for one program of ours. The
// kernel's own limit is a million; the agent waits for the verifier.
const mostVerified = 50_000

var instructions = regexp.MustCompile(`processed (\d+) insns`)

// TestObjects loads each program of all BPF objects into this kernel, and logs how many instructions
// its verifier processed. It logs a rejected program with the reason: a program may have another for
// kernels that refuse it, and the stories of the features need those that must load.
func TestObjects(t *testing.T) {
	testkit.Smoke(t)
	testkit.NeedRoot(t)
	top := "/objects" // where package vm puts them
	if host, _ := os.Hostname(); host != "guest" {
		top = "../../.."
	} else if v := version(t); v[0] < 6 {
		testkit.Skip(t, "kernel is older than those that fairlead supports")
	}
	testkit.Must(t, rlimit.RemoveMemlock())
	count := 0
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "build" || d.Name() == ".git"):
			return fs.SkipDir
		case strings.HasSuffix(path, "_bpfel.o"):
			count++
			t.Run(strings.TrimSuffix(d.Name(), "_bpfel.o"), func(t *testing.T) { verified(t, path) })
		}
		return nil
	})
	testkit.Must(t, err)
	if count == 0 {
		t.Errorf("no BPF object below %s", top)
	}
}

// verified loads the programs of an object one by one. They share its maps.
func verified(t *testing.T, path string) {
	spec, err := ebpf.LoadCollectionSpec(path)
	testkit.Must(t, err)
	data := spec.Copy()
	data.Programs = nil
	shared, err := ebpf.NewCollection(data)
	testkit.Must(t, err)
	defer shared.Close()
	have := maps.Clone(shared.Maps)
	maps.DeleteFunc(have, func(name string, _ *ebpf.Map) bool { return strings.HasPrefix(name, ".rodata") })
	loaded := 0
	for _, name := range slices.Sorted(maps.Keys(spec.Programs)) {
		one := spec.Copy()
		one.Programs = map[string]*ebpf.ProgramSpec{name: one.Programs[name]}
		options := ebpf.CollectionOptions{MapReplacements: have, Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}}
		c, err := ebpf.NewCollectionWithOptions(one, options)
		if err != nil {
			t.Logf("%-16s not loaded: %v", name, err)
			continue
		}
		loaded++
		n := 0
		if m := instructions.FindStringSubmatch(c.Programs[name].VerifierLog); m != nil {
			n, _ = strconv.Atoi(m[1]) // of digits
		}
		c.Close()
		t.Logf("%-16s %7d instructions", name, n)
		if n > mostVerified {
			t.Errorf("%s: the verifier looked at %d instructions, of at most %d", name, n, mostVerified)
		}
	}
	if loaded == 0 && len(spec.Programs) > 0 {
		t.Error("the kernel takes none of the programs")
	}
}
