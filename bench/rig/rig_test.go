package rig

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/sandbox"
)

func TestMain(m *testing.M) {
	if status, ok := sandbox.Reexec(os.Args); ok {
		os.Exit(status)
	}
	if status, ok := load.Reexec(os.Args); ok {
		os.Exit(status)
	}
	if status, ok := Reexec(os.Args); ok {
		os.Exit(status)
	}
	testkit.Main(m)
}

func build(t *testing.T, cfg Config) *Rig {
	t.Helper()
	testkit.NeedRoot(t)
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		dirs := append(r.Receiver.Cgroups(), r.Sandboxes.Dir())
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		for _, dir := range dirs {
			if _, err := os.Stat(dir); err == nil {
				t.Errorf("%s is left", dir)
			}
		}
	})
	return r
}

// moves reports whether the generator counts within the test's patience.
func moves(g *Generator) bool {
	before := g.Read()
	for range 1000 {
		if g.Read().Since(before).Ops > 0 {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

func TestTraffic(t *testing.T) {
	for _, path := range []Path{Hop, NIC} {
		t.Run(string(path), func(t *testing.T) {
			r := build(t, Config{Path: path})
			for _, kind := range []Traffic{UDP, Overrun, TCP, UDPRR, TCPRR} {
				send, recv, err := r.Send(t.Context(), kind)
				if err != nil {
					t.Fatalf("%s: %v", kind, err)
				}
				if n := send.Read().Since(load.Reading{}).Ops; n != 0 {
					t.Errorf("%s: %d sent before it was let go", kind, n)
				}
				send.SetRate(20000)
				if !moves(send) || !moves(recv) {
					t.Errorf("%s: nothing sent, or nothing received", kind)
				}
				for _, g := range []*Generator{send, recv} {
					if err := g.Stop(); err != nil {
						t.Errorf("%s: %v", kind, err)
					}
				}
			}
			if _, _, err := r.Send(t.Context(), "pigeon"); err == nil {
				t.Error("pigeons are sent")
			}
		})
	}
}

// TestSteering looks at where the packets are received: on the shared CPU, and
// at the NIC by the queue that Config promises.
func TestSteering(t *testing.T) {
	r := build(t, Config{Path: NIC, VictimShare: 80, ReceiverShare: 20})
	send, recv, err := r.Send(t.Context(), UDP)
	if err != nil {
		t.Fatal(err)
	}
	before := netRx(t)
	send.SetRate(20000)
	for recv.Read().Since(load.Reading{}).Ops < 5000 {
		if !moves(recv) {
			t.Fatal("nothing received")
		}
	}
	after := netRx(t)
	if shared := after[sharedCPU] - before[sharedCPU]; shared < 1000 {
		t.Errorf("CPU %d received %d times, CPU %d %d times", sharedCPU, shared, senderCPU, after[senderCPU]-before[senderCPU])
	}
	masks := map[string]string{}
	err = r.Node.Sysfs(func(sys string) error {
		files, err := filepath.Glob(filepath.Join(sys, "class/net", NICDevice, "queues/rx-*/rps_cpus"))
		for _, f := range files {
			data, _ := os.ReadFile(f)
			masks[filepath.Base(filepath.Dir(f))] = strings.TrimSpace(string(data))
		}
		return err
	})
	if err != nil || len(masks) != 2 || masks["rx-0"] != "1" || masks["rx-1"] != "1" {
		t.Errorf("rps_cpus of the NIC: %v (%v)", masks, err)
	}
}

// netRx counts the packets that each CPU has taken from a backlog or a device
// since boot: the first column of softnet_stat, which is hexadecimal.
func netRx(t *testing.T) []uint64 {
	t.Helper()
	data, err := os.ReadFile("/proc/net/softnet_stat")
	if err != nil {
		t.Fatal(err)
	}
	var counts []uint64
	for line := range strings.Lines(string(data)) {
		var n uint64
		for _, c := range strings.Fields(line)[0] {
			n = n<<4 + uint64(strings.IndexRune("0123456789abcdef", c))
		}
		counts = append(counts, n)
	}
	return counts
}

func TestNewRefuses(t *testing.T) {
	testkit.NeedRoot(t)
	if r, err := New(Config{Path: "pigeon"}); err == nil {
		r.Close()
		t.Error("a rig of pigeons was built")
	}
	// A quota that the kernel refuses is found half way, after namespaces.
	if r, err := New(Config{VictimShare: -1, ReceiverShare: 20_000_000_000}); err == nil {
		r.Close()
		t.Error("an impossible quota was taken")
	}
	if left, _ := filepath.Glob(filepath.Join(stateParent, fmt.Sprintf("rig-fl%d-*", os.Getpid()))); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
