package isolate

import (
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// For super-packets TSO goes back to what it was before the container was isolated,
// and no further.
func TestSuperIsWhatItWas(t *testing.T) {
	testkit.OnKernels(t)
	is, ns, index, at := bare(t)
	end := container.HostEnd{NetNS: ns.Inode(), NSPath: at, Index: index}
	knob := ns.Offload(index, netdev.TSO)
	for _, was := range []string{netdev.TSO.On(), "tx-tcp-segmentation", netdev.Off} {
		must(t, knob.Write(was))
		isolated := &isolation{payer: container.Container{ID: 1, Interfaces: []container.Interface{{Kind: "veth", Host: end}}}}
		for _, step := range []struct {
			shape shape
			want  string
		}{{single, netdev.Off}, {super, was}, {super, was}, {single, netdev.Off}} {
			e, err := is.lookAtEnd(end)
			must(t, err)
			err = is.turn(e.sending(step.shape), is.owns(1))
			e.close()
			must(t, err)
			if got, err := knob.Read(); err != nil || got != step.want {
				t.Errorf("tso was %s, shape %d: it is %s (%v), want %s", was, step.shape, got, err, step.want)
			}
		}
		if off, err := is.switchedOff(isolated); err != nil || off != (was != netdev.Off) {
			t.Errorf("tso was %s: switched off by us %v, %v", was, off, err)
		}
		must(t, is.restore(func(e journal.Entry) bool { return true }))
		if got, err := knob.Read(); err != nil || got != was {
			t.Errorf("tso was %s: it is %s (%v) in the end", was, got, err)
		}
	}
}
