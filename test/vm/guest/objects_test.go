package guest

import (
	"fmt"
	"io/fs"
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

// mostVerified limits the instructions that a kernel's verifier may process for one program of ours.
// The kernel's own limit is a million; the agent waits for the verifier.
const mostVerified = 100_000

var instructions = regexp.MustCompile(`processed (\d+) insns`)

// TestObjects loads all BPF objects into this kernel, and logs how many instructions its verifier
// processed for each program. It logs a rejected program with the reason: a program may have another
// for kernels that refuse it, and the stories of the features need those that must load.
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

// verified loads the programs of an object: together, or where the kernel rejects one, one by one.
func verified(t *testing.T, path string) {
	spec, err := ebpf.LoadCollectionSpec(path)
	testkit.Must(t, err)
	options := ebpf.CollectionOptions{Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}}
	var logs []string
	load := func(spec *ebpf.CollectionSpec) error {
		c, err := ebpf.NewCollectionWithOptions(spec, options)
		if err != nil {
			return err
		}
		defer c.Close()
		for name, p := range c.Programs {
			n := 0
			if m := instructions.FindStringSubmatch(p.VerifierLog); m != nil {
				n, _ = strconv.Atoi(m[1]) // of digits
			}
			logs = append(logs, fmt.Sprintf("%7d instructions %s", n, name))
			if n > mostVerified {
				t.Errorf("%s: the verifier looked at %d instructions, of at most %d", name, n, mostVerified)
			}
		}
		return nil
	}
	if load(spec.Copy()) != nil {
		for name, p := range spec.Programs {
			one := spec.Copy()
			one.Programs = map[string]*ebpf.ProgramSpec{name: p.Copy()}
			if err := load(one); err != nil {
				t.Logf("%s is not loaded: %v", name, err)
			}
		}
	}
	slices.Sort(logs)
	t.Log(strings.Join(logs, "\n"))
	if len(logs) == 0 && len(spec.Programs) > 0 {
		t.Error("the kernel takes none of the programs")
	}
}
