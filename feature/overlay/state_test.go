package overlay

import (
	"errors"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/feature"
)

// A container with a host end in an untrusted namespace is on no network that can be examined, and
// its status reports that.
func TestUntrusted(t *testing.T) {
	r := newRig(t, apart)
	n := r.nodes[0]
	n.c.Interfaces[0].Host.Trusted = false
	if err := n.apply(t, true); !errors.Is(err, feature.ErrPartly) || !strings.Contains(err.Error(), "eth0: its host end") {
		t.Errorf("got %v, want that its host end is the reason", err)
	}
	n.c.Interfaces[0].Host.Trusted = true
	must(t, r.nodes[1].apply(t, true))
	must(t, n.apply(t, true))
}
