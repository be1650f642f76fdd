package rig

import (
	"fmt"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestTap checks that a tap has each request to the port and its reply, in order, and no other
// packet.
func TestTap(t *testing.T) {
	testkit.NeedRoot(t)
	r := build(t, Config{Path: NIC})
	tap, err := r.Tap(9001)
	must(t, err)
	defer tap.Close()
	const n = 20
	for _, port := range []int{9002, 9001} {
		if _, err := r.Start(t.Context(), r.Outside, "rr-server", "--proto", "udp", "--listen", fmt.Sprintf(":%d", port)); err != nil {
			t.Fatal(err)
		}
		g, err := r.Start(t.Context(), r.Boxes[0], "rr-client", "--proto", "udp", "--to", r.Uplink(port), "--conns", "1", "--rate", "1000", "--count", fmt.Sprint(n))
		must(t, err)
		counted(t, g, n)
	}
	trips, err := tap.Trips()
	if err != nil || len(trips) != n {
		t.Fatalf("%d round trips, want %d: %v", len(trips), n, err)
	}
	for i, trip := range trips {
		if trip.Answered <= trip.Asked || i > 0 && trip.Asked <= trips[i-1].Answered {
			t.Errorf("%d: %+v", i, trips)
		}
	}
}
