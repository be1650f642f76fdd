package netcpu

import (
	"errors"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// For super-packets TSO goes back to what it was before the container was isolated,
// and no further.
func TestSuperIsWhatItWas(t *testing.T) {
	testkit.OnKernels(t)
	n, ns, index, at := bareNetcpu(t)
	end := container.HostEnd{NetNS: ns.Inode(), NSPath: at, Index: index}
	knob := ns.Offload(index, netdev.TSO)
	for _, was := range []string{netdev.TSO.On(), "tx-tcp-segmentation", netdev.Off} {
		if err := knob.Write(was); err != nil {
			t.Fatal(err)
		}
		tenant := &tenant{owner: 1, members: map[container.ID]container.Container{
			1: {ID: 1, Interfaces: []container.Interface{{Kind: "veth", Host: end}}},
		}}
		for _, step := range []struct {
			shape shape
			want  string
		}{{single, netdev.Off}, {super, was}, {super, was}, {single, netdev.Off}} {
			if err := n.setTSO(end, step.shape, 1); err != nil {
				t.Fatal(err)
			}
			if got, err := knob.Read(); err != nil || got != step.want {
				t.Errorf("tso was %s, shape %d: it is %s (%v), want %s", was, step.shape, got, err, step.want)
			}
		}
		if off, err := n.switchedOff(tenant); err != nil || off != (was != netdev.Off) {
			t.Errorf("tso was %s: switched off by us %v, %v", was, off, err)
		}
		if err := n.restore(func(e journal.Entry) bool { return true }); err != nil {
			t.Fatal(err)
		}
		if got, err := knob.Read(); err != nil || got != was {
			t.Errorf("tso was %s: it is %s (%v) in the end", was, got, err)
		}
	}
}

// An error in each window fills no log, whatever it says.
func TestTroubleIsTold(t *testing.T) {
	var tr trouble
	now, told, windows := time.Unix(1000, 0), 0, 0
	for range 601 {
		if w := tr.tell(now, errors.New(now.String())); w > 0 {
			told++
			windows += w
		}
		if tr.tell(now, nil) != 0 {
			t.Error("told that nothing went wrong")
		}
		now = now.Add(controlEvery)
	}
	if told != 11 || windows != 601 {
		t.Errorf("told %d times of %d windows, want 11 of 601", told, windows)
	}
}
