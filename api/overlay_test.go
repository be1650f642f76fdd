package api

import (
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

	"github.com/fairlead-project/fairlead/internal/testkit"
)

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
	testkit.Same(t, "after", want, got, cmpopts.EquateEmpty())
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
	testkit.Same(t, "reasons with a text, and in the document", slices.Sorted(maps.Keys(slowTexts())), words)
	guide, err := os.ReadFile("../docs/overlay.md")
	testkit.Must(t, err)
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
