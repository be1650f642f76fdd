package serve

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/api"
)

// overlayBackend records the requests to the feature, and has some networks.
type overlayBackend struct {
	backend
	asked []api.Ask
}

func (b *overlayBackend) Command(_ context.Context, ask api.Ask) (any, error) {
	b.asked = append(b.asked, ask)
	to := ask.Body.(api.OverlaySwitch)
	return api.OverlayNetwork{Network: to.Network, State: api.OverlayKilled, Why: "by " + to.By}, nil
}

func (b *overlayBackend) Report(_ context.Context, ask api.Ask) (any, error) {
	b.asked = append(b.asked, ask)
	return api.Overlay{Networks: []api.OverlayNetwork{
		{Network: "cilium_vxlan", Device: "cilium_vxlan", State: api.OverlayLeftAlone, Why: "Cilium forwards its packets by programs of its own"},
		{Network: "flannel.1", Device: "flannel.1", State: api.OverlayOn},
		{Network: "vxlan0@7", Device: "vxlan0", NetNS: 7, State: api.OverlayOff},
		{Network: "vxlan1@7", Device: "vxlan1", NetNS: 7}, {Network: "vxlan1@8", Device: "vxlan1", NetNS: 8},
	}}, nil
}

func TestOverlayAsk(t *testing.T) {
	b := new(overlayBackend)
	socket := served(t, b, 0o660, Serve)
	c := api.Dial(socket)
	defer c.Close()
	for _, tt := range []struct {
		ref   string
		flows int
		err   string
	}{
		{"", 0, ""}, {"web", 0, ""}, {"a/b c?d#e", 20, ""}, {"", api.MaxOverlayFlows, ""},
		{"", api.MaxOverlayFlows + 1, `flows="1001": want a number from 1 to 1000`},
	} {
		b.asked = nil
		o, err := c.Overlay(t.Context(), tt.ref, tt.flows)
		if tt.err != "" {
			if err == nil || err.Error() != tt.err || !isCode(err, "bad_request") || b.asked != nil {
				t.Errorf("%d flows: %v; asked %+v", tt.flows, err, b.asked)
			}
			continue
		}
		if want := []api.Ask{{Feature: "overlay", Container: tt.ref, Body: api.OverlayAsk{Flows: tt.flows}}}; err != nil || len(o.Networks) != 5 || !cmp.Equal(want, b.asked) {
			t.Errorf("%+v: %v, %+v; asked %+v", tt, err, o, b.asked)
		}
	}
	for _, flows := range []string{"0", "-1", "many"} {
		if answer := raw(t, socket, "GET /v1/overlay?flows="+flows+" HTTP/1.1\r\nHost: x\r\n\r\n"); !strings.Contains(answer, `"code":"bad_request"`) {
			t.Errorf("flows=%s: %s", flows, answer)
		}
	}
}

// A network is killed and revived by its name, or by the name of its device if no other network has
// that. The backend learns the peer.
func TestOverlayKill(t *testing.T) {
	b := new(overlayBackend)
	c := api.Dial(served(t, b, 0o660, Serve))
	defer c.Close()
	for _, tt := range []struct{ ref, network, code, text string }{
		{"flannel.1", "flannel.1", "", ""},
		{"vxlan0@7", "vxlan0@7", "", ""},
		{"vxlan0", "vxlan0@7", "", ""},
		{"vxlan1@8", "vxlan1@8", "", ""},
		{"vxlan1", "", "ambiguous", `"vxlan1" may be any of vxlan1@7, vxlan1@8`},
		{"eth0", "", "not_found", `there is no overlay network "eth0" here`},
		{"cilium_vxlan", "", "refused", "cilium_vxlan has no fast path: Cilium forwards its packets by programs of its own"},
	} {
		for _, kill := range []bool{true, false} {
			b.asked = nil
			do := c.ReviveOverlay
			if kill {
				do = c.KillOverlay
			}
			n, err := do(t.Context(), tt.ref)
			if tt.code != "" {
				if e := (*api.Error)(nil); !errors.As(err, &e) || e.Code != tt.code || e.Text != tt.text || len(b.asked) != 1 {
					t.Errorf("%s: %v; asked %+v", tt.ref, err, b.asked)
				}
				continue
			}
			if err != nil || n.Network != tt.network || n.Why != "by uid 0" || len(b.asked) != 2 {
				t.Fatalf("%s: %+v, %v; asked %+v", tt.ref, n, err, b.asked)
			}
			if diff := cmp.Diff(api.Ask{Feature: "overlay", Body: api.OverlaySwitch{Network: tt.network, Kill: kill, By: "uid 0"}}, b.asked[1]); diff != "" {
				t.Errorf("%s (-want +asked):\n%s", tt.ref, diff)
			}
		}
	}
}
