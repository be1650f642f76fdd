package api

import (
	"context"
	"errors"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// overlayBackend notes what is asked of the feature, and has some networks.
type overlayBackend struct {
	backend
	asked []Ask
}

func (b *overlayBackend) Report(_ context.Context, ask Ask) (any, error) {
	b.asked = append(b.asked, ask)
	if to, ok := ask.Body.(OverlaySwitch); ok {
		return OverlayNetwork{Network: to.Network, State: OverlayKilled, Why: "by " + to.By}, nil
	}
	return Overlay{Networks: []OverlayNetwork{
		{Network: "cilium_vxlan", Device: "cilium_vxlan", State: OverlayLeftAlone, Why: "Cilium forwards its packets by programs of its own"},
		{Network: "flannel.1", Device: "flannel.1", State: OverlayOn},
		{Network: "vxlan0@7", Device: "vxlan0", NetNS: 7, State: OverlayOff},
		{Network: "vxlan1@7", Device: "vxlan1", NetNS: 7}, {Network: "vxlan1@8", Device: "vxlan1", NetNS: 8},
	}}, nil
}

func TestOverlayAsk(t *testing.T) {
	b := new(overlayBackend)
	c := Dial(served(t, b, 0o660, Serve))
	defer c.Close()
	for _, tt := range []struct {
		ref   string
		flows int
		err   string
	}{
		{"", 0, ""}, {"web", 0, ""}, {"a/b c?d#e", 20, ""}, {"", MaxOverlayFlows, ""},
		{"", MaxOverlayFlows + 1, `flows="1001": want a number from 1 to 1000`},
	} {
		b.asked = nil
		o, err := c.Overlay(t.Context(), tt.ref, tt.flows)
		if tt.err != "" {
			if err == nil || err.Error() != tt.err || !isCode(err, "bad_request") || b.asked != nil {
				t.Errorf("%d flows: %v; asked %+v", tt.flows, err, b.asked)
			}
			continue
		}
		if want := []Ask{{Feature: "overlay", Container: tt.ref, Body: OverlayAsk{Flows: tt.flows}}}; err != nil || len(o.Networks) != 5 || !cmp.Equal(want, b.asked) {
			t.Errorf("%+v: %v, %+v; asked %+v", tt, err, o, b.asked)
		}
	}
	for _, flows := range []string{"0", "-1", "many"} {
		if err := c.do(t.Context(), "GET", "/v1/overlay?flows="+flows, nil, new(Overlay)); !isCode(err, "bad_request") {
			t.Errorf("flows=%s: %v", flows, err)
		}
	}
}

// A network is killed and revived by its name, or by that of its device where that is no
// other's. Who did it is known.
func TestOverlayKill(t *testing.T) {
	b := new(overlayBackend)
	c := Dial(served(t, b, 0o660, Serve))
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
				if e := (*Error)(nil); !errors.As(err, &e) || e.Code != tt.code || e.Text != tt.text || len(b.asked) != 1 {
					t.Errorf("%s: %v; asked %+v", tt.ref, err, b.asked)
				}
				continue
			}
			if err != nil || n.Network != tt.network || n.Why != "by uid 0" || len(b.asked) != 2 {
				t.Fatalf("%s: %+v, %v; asked %+v", tt.ref, n, err, b.asked)
			}
			if diff := cmp.Diff(Ask{Feature: "overlay", Body: OverlaySwitch{Network: tt.network, Kill: kill, By: "uid 0"}}, b.asked[1]); diff != "" {
				t.Errorf("%s (-want +asked):\n%s", tt.ref, diff)
			}
		}
	}
}

func TestOverlayAfter(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	before := Overlay{Taken: at,
		Networks: []OverlayNetwork{{Network: "a", Generation: 3, Evictions: []OverlayEviction{{"full", 4}, {"closed", 1}},
			Egress:  OverlayTraffic{OverlayPackets: OverlayPackets{100, 1000, 10, 100}, Reasons: []OverlayReason{{SlowLease, 8}, {SlowNoEntry, 2}}},
			Ingress: OverlayTraffic{OverlayPackets: OverlayPackets{1, 1, 1, 1}}}},
		Containers: []OverlayContainer{{Container: 7, Ends: []OverlayEnd{{Network: "a", Device: "eth0", Egress: OverlayWay{Way: WayFast, OverlayPackets: OverlayPackets{5, 50, 1, 10}}}}}},
	}
	now := Overlay{Taken: at.Add(2 * time.Second),
		Networks: []OverlayNetwork{
			{Network: "a", Generation: 4, Tables: []OverlayTable{{"flow", 9, 10}}, Evictions: []OverlayEviction{{"full", 6}, {"closed", 1}},
				Egress:  OverlayTraffic{OverlayPackets: OverlayPackets{150, 1500, 20, 200}, Reasons: []OverlayReason{{SlowLease, 9}, {SlowNoEntry, 2}, {SlowMTU, 9}}, Saved: 400},
				Ingress: OverlayTraffic{OverlayPackets: OverlayPackets{0, 0, 1, 1}}}, // counts anew
			{Network: "b", Egress: OverlayTraffic{OverlayPackets: OverlayPackets{Slow: 3}}},
		},
		Containers: []OverlayContainer{
			{Container: 7, Ends: []OverlayEnd{{Network: "a", Device: "eth0", Egress: OverlayWay{Way: WaySlow, Why: "x", OverlayPackets: OverlayPackets{6, 60, 3, 30}}}, {Network: "b", Device: "eth1", Ingress: OverlayWay{Way: WayPeer, OverlayPackets: OverlayPackets{Fast: 2}}}}},
		},
	}
	want := Overlay{Since: at, Taken: now.Taken,
		Networks: []OverlayNetwork{
			{Network: "a", Generation: 4, Tables: []OverlayTable{{"flow", 9, 10}}, Evictions: []OverlayEviction{{"full", 2}},
				Egress:  OverlayTraffic{OverlayPackets: OverlayPackets{50, 500, 10, 100}, Reasons: []OverlayReason{{SlowMTU, 9}, {SlowLease, 1}}, Saved: 400},
				Ingress: OverlayTraffic{OverlayPackets: OverlayPackets{}}},
			{Network: "b", Egress: OverlayTraffic{OverlayPackets: OverlayPackets{Slow: 3}}},
		},
		Containers: []OverlayContainer{
			{Container: 7, Ends: []OverlayEnd{{Network: "a", Device: "eth0", Egress: OverlayWay{Way: WaySlow, Why: "x", OverlayPackets: OverlayPackets{1, 10, 2, 20}}}, {Network: "b", Device: "eth1", Ingress: OverlayWay{Way: WayPeer, OverlayPackets: OverlayPackets{Fast: 2}}}}},
		},
	}
	unchanged := now.After(Overlay{})
	got := now.After(before)
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("after (-want +got):\n%s", diff)
	}
	if again := now.After(Overlay{}); !cmp.Equal(unchanged, again) {
		t.Errorf("After has changed what it was called on:\n%s", cmp.Diff(unchanged, again))
	}
	if rate, ok := got.Networks[0].Egress.HitRate(); !ok || rate != 50./60 {
		t.Errorf("hit rate %v, %v", rate, ok)
	}
	if _, ok := got.Networks[0].Ingress.HitRate(); ok {
		t.Error("a hit rate without packets")
	}
}

// Each reason has a text that fits beside two numbers on a terminal of 80 columns, and is in
// both documents.
func TestSlowText(t *testing.T) {
	field, _ := reflect.TypeFor[OverlayReason]().FieldByName("Reason")
	words := slices.Sorted(slices.Values(regexp.MustCompile(`, | or `).Split(field.Tag.Get("doc"), -1)))
	if diff := cmp.Diff(slices.Sorted(maps.Keys(slowTexts())), words); diff != "" {
		t.Errorf("reasons (-with a text +in the document):\n%s", diff)
	}
	guide, err := os.ReadFile("../docs/overlay.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range words {
		if !strings.Contains(string(guide), "`"+word+"`") {
			t.Errorf("docs/overlay.md has no %s", word)
		}
		if text := SlowText(word); text == "" || len(text) > 46 {
			t.Errorf("%s: %q has %d characters", word, text, len(text))
		}
	}
	if text := SlowText("later"); text != "" {
		t.Errorf("of a reason that is not known: %q", text)
	}
}
