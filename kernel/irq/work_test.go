package irq

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

const (
	someStat = "cpu  9 9 9 9 9 99 99 0\ncpu0 1 2 3 4 5 10 20 0 0 0\ncpu2 1 2 3 4 5 0 7\nintr 5 6 7\ncpux 1 2 3 4 5 6 7\n"
	someSoft = "                    CPU0       CPU2\n          HI:          1          2\n      NET_TX:          3          4\n      NET_RX:         10         20\n       BLOCK:          5          6\n"
)

func TestParseWorks(t *testing.T) {
	soft, err := parseInterrupts(someSoft)
	must(t, err)
	got := parseWorks(someStat, soft)
	want := map[int]Work{0: {300 * time.Millisecond, 13, 5, 90 * time.Millisecond}, 2: {70 * time.Millisecond, 24, 6, 90 * time.Millisecond}}
	testkit.Same(t, "works", want, got)
}

func TestForNetwork(t *testing.T) {
	before := Work{Time: time.Second, Network: 100, Block: 100}
	for _, c := range []struct {
		now  Work
		want time.Duration
	}{
		{before, 0},
		{Work{Time: 2 * time.Second, Network: 100, Block: 200}, 0},
		{Work{Time: 2 * time.Second, Network: 200, Block: 100}, time.Second},
		{Work{Time: 2 * time.Second, Network: 175, Block: 125}, 750 * time.Millisecond},
		{Work{Time: 0, Network: 200, Block: 200}, 0}, // the counters went backwards
		{Work{Time: 2 * time.Second, Network: 0, Block: 0}, 0},
	} {
		testkit.Same(t, fmt.Sprintf("%+v", c.now), c.want, c.now.ForNetwork(before))
	}
}

func TestWorksAndCount(t *testing.T) {
	works, err := Works("/proc")
	if err != nil || len(works) == 0 {
		t.Errorf("%v, %v", works, err)
	}
	sys := testkit.Tree(t, map[string]string{"kernel/irq/5/per_cpu_count": "3,0,4\n"})
	if n, none := Count(sys, 5), Count(sys, 6); n != 7 || none != 0 {
		t.Errorf("%d and %d, want 7 and 0", n, none)
	}
	testkit.Fails(t, "without the files", testkit.Err(Works(t.TempDir())))
}

func FuzzParseWorks(f *testing.F) {
	f.Add(someStat, someSoft)
	f.Add("cpu0 1 2 3 4 5 99999999999999999999 1\n", "CPU0 CPU1 CPU9\nNET_RX: 1 2 3 4 5\n")
	f.Fuzz(func(t *testing.T, stat, soft string) {
		softirqs, _ := parseInterrupts(soft)
		for cpu, w := range parseWorks(stat, softirqs) {
			if cpu < 0 || w.Time < 0 {
				t.Fatalf("cpu %d: %+v", cpu, w)
			}
		}
	})
}

const someSoftnet = "0001e240 00000000 00000001 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000\n" +
	"fffffff0 00000000 00000001 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 0000000a 00000000 00000000\n"

func TestPackets(t *testing.T) {
	proc := t.TempDir()
	must(t, os.Mkdir(filepath.Join(proc, "net"), 0o755))
	must(t, os.WriteFile(filepath.Join(proc, "net/softnet_stat"), []byte(someSoftnet), 0o644))
	testkit.Gives(t, "packets", map[int]uint32{0: 123456, 10: 0xfffffff0})(Packets(proc))
	if got, err := Packets("/proc"); err != nil || len(got) == 0 {
		t.Errorf("on this kernel: %v, %v", got, err)
	}
}
