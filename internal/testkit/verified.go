package testkit

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
)

// mostVerified limits the instructions that the verifier may process for one program of ours. The
// kernel's own limit is a million; the agent waits for the verifier.
const mostVerified = 50_000

var (
	verifiedFor  = regexp.MustCompile(`verification time (\d+) usec`)
	instructions = regexp.MustCompile(`processed (\d+) insns`)
)

// Verified loads each program of a BPF object, read by bpf2go's function, and logs how many
// instructions the verifier of this kernel processed, and for how long. It fails t for a program
// beyond mostVerified, and if the kernel accepts no program. It logs a rejected program with the
// reason: other tests need the programs that must load. VM_RUN=TestVerified has the guests of
// test/vm report the same for other kernels.
func Verified(t *testing.T, read func() (*ebpf.CollectionSpec, error)) {
	t.Helper()
	NeedRoot(t)
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	spec, err := read()
	if err != nil {
		t.Fatal(err)
	}
	data := spec.Copy()
	data.Programs = nil
	shared, err := ebpf.NewCollection(data)
	if err != nil {
		t.Fatal(err)
	}
	defer shared.Close()
	have := maps.Clone(shared.Maps)
	maps.DeleteFunc(have, func(name string, _ *ebpf.Map) bool { return strings.HasPrefix(name, ".rodata") })
	total, count, most := time.Duration(0), 0, 0
	for _, name := range slices.Sorted(maps.Keys(spec.Programs)) {
		n, took, err := verify(spec, name, have)
		if err != nil {
			t.Logf("%-16s not loaded: %v", name, err)
			continue
		}
		t.Logf("%-16s %7d instructions %8v", name, n, took)
		if n > mostVerified {
			t.Errorf("%s: the verifier looked at %d instructions, of at most %d", name, n, mostVerified)
		}
		total, count, most = total+took, count+1, max(most, n)
	}
	if count == 0 {
		t.Error("the kernel takes none of the programs")
	}
	t.Logf("%d of %d programs, at most %d instructions, %v in all", count, len(spec.Programs), most, total)
}

// verify loads one program, and reads the verifier's counts from its log.
func verify(spec *ebpf.CollectionSpec, name string, have map[string]*ebpf.Map) (n int, took time.Duration, err error) {
	one := spec.Copy()
	one.Programs = map[string]*ebpf.ProgramSpec{name: one.Programs[name]}
	options := ebpf.CollectionOptions{MapReplacements: have, Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}}
	c, err := ebpf.NewCollectionWithOptions(one, options)
	if err != nil {
		return 0, 0, err
	}
	defer c.Close()
	log := c.Programs[name].VerifierLog
	number := func(re *regexp.Regexp) int {
		m := re.FindStringSubmatch(log)
		if m == nil {
			return 0
		}
		v, _ := strconv.Atoi(m[1]) // of digits
		return v
	}
	return number(instructions), time.Duration(number(verifiedFor)) * time.Microsecond, nil
}
