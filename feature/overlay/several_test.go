package overlay

import (
	"fmt"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// guest is one more container of a node.
func (r *rig) guest(n *node, name string, last int) (b *sandbox.Box, addr string) {
	r.T.Helper()
	b = r.Create(sandbox.Spec{Name: named(name, n.n)})
	subnet := "0"
	if r.form == routed {
		subnet = fmt.Sprint(n.n)
	}
	addr = fmt.Sprintf("10.244.%s.%d", subnet, last)
	c := r.join(n, b, name, "", addr, fmt.Sprintf("fd00:244:%s::%d", subnet, last))
	must(r.T, n.applyTo(r.T, c, true))
	return b, addr
}

// Each of several containers that exchange packets with the same remote one is fast.
func TestSeveral(t *testing.T) {
	for _, form := range testkit.Cases(t, 1, bridged, routed) {
		t.Run(form, func(t *testing.T) {
			r := newRig(t, form)
			r.on()
			newSink(t, r.nodes[1].web)
			second, _ := r.guest(r.nodes[0], "vb", 20)
			first, other := newStream(t, r.nodes[0].web, r.nodes[1].addr), newStream(t, second, r.nodes[1].addr)
			r.quick(first)
			r.quick(other)
			r.quick(first)
		})
	}
}
