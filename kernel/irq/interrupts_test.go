package irq

import (
	"reflect"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestParseInterrupts(t *testing.T) {
	cpus := []int{0, 2}
	got, err := parseInterrupts("           CPU0       CPU2       \n" +
		"  1:          9          0   IO-APIC   1-edge      i8042\n" +
		" 26:        100         20   PCI-MSIX-0000:00:03.0   1-edge      virtio0-req.0\n" +
		" 27:          1          2\n" +
		"LOC:         30          4   Local timer interrupts\n" +
		"ERR:          0\n")
	want := []Interrupts{
		{"i8042", 1, cpus, []uint64{9, 0}}, {"virtio0-req.0", 26, cpus, []uint64{100, 20}}, {"27", 27, cpus, []uint64{1, 2}}, {"LOC", -1, cpus, []uint64{30, 4}},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	got, err = parseInterrupts("  CPU0 CPU2\n  NET_RX: 5 6\n   BLOCK: 7 8\n")
	want = []Interrupts{{"NET_RX", -1, cpus, []uint64{5, 6}}, {"BLOCK", -1, cpus, []uint64{7, 8}}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "\n", "CPU99999999\n", "x\n", " CPU0\nno colon\n", " CPU0\nLOC: x\n", " CPU0\nLOC: -1\n"} {
		testkit.Fails(t, bad, testkit.Err(parseInterrupts(bad)))
	}
}

func TestParseStolen(t *testing.T) {
	if d, err := parseStolen("cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 1 1 1 1 1 1 1\n"); err != nil || d != 80*time.Millisecond {
		t.Errorf("%v, %v", d, err)
	}
	for _, bad := range []string{"", "cpu 1 2 3 4 5 6 7\n", "cpu0 1 2 3 4 5 6 7 8\n", "cpu 1 2 3 4 5 6 7 x\n"} {
		testkit.Fails(t, bad, testkit.Err(parseStolen(bad)))
	}
}

func FuzzParseInterrupts(f *testing.F) {
	for _, s := range []string{"", "CPU0\n", "CPU0 CPU1\n1: 2 3 x-edge y\n", "CPU0\nERR:\n", "CPU0\n: 1\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		all, err := parseInterrupts(s)
		if err != nil && all != nil {
			t.Fatalf("%+v, %v", all, err)
		}
		for _, i := range all {
			if len(i.Counts) == 0 {
				t.Fatalf("%+v", i)
			}
		}
		if d, err := parseStolen(s); d < 0 || err != nil && d != 0 {
			t.Fatalf("%v, %v", d, err)
		}
	})
}
