package overlay

import (
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/feature/overlay/network"
	"github.com/fairlead-project/fairlead/policy"
)

// What another feature is about to do counts as soon as policy asks for it, in either order of
// calls.
func TestOthers(t *testing.T) {
	r := newRig(t, bridged)
	n := r.nodes[0]
	on := true
	for _, x := range []struct {
		settings policy.Settings
		way      network.Mode
		word     string
	}{
		{policy.Settings{}, network.Peer, ""},
		{policy.Settings{NetCPU: policy.NetCPUIsolate, NetCPUSteal: new(float64)}, network.End, network.Thread},
		{policy.Settings{NetCPU: policy.NetCPUAuto}, network.Peer, ""},
		{policy.Settings{Latency: &on}, network.End, network.Watched},
		{policy.Settings{}, network.Peer, ""},
	} {
		x.settings.Overlay = &on
		must(t, n.f.Apply(t.Context(), policy.Target{Container: n.c, Settings: x.settings}))
		o, err := n.f.Report(t.Context(), nil, api.Ask{Body: api.OverlayAsk{}})
		must(t, err)
		got := o.(api.Overlay).Containers[0].Ends[0].Ingress
		if got.Way != string(x.way) || got.Reason != x.word {
			t.Errorf("with %+v the way is %+v, want %s", x.settings, got, x.way)
		}
	}
}
