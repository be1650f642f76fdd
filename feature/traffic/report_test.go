package traffic

import (
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// A container without policy sees the classes of the container that shares its network, and no others.
// In the host's network each container has separate classes.
func TestRowsShared(t *testing.T) {
	app, other := container.ID(2), container.ID(3)
	r := Reading{Rows: []Row{
		{TrafficClass: api.TrafficClass{Container: api.ID(app), Uplink: "eth0"}, Members: []container.ID{app}, tenant: identity.Tenant{NetNS: 70}},
		{TrafficClass: api.TrafficClass{Container: api.ID(other), Uplink: "eth0"}, Members: []container.ID{other}, tenant: identity.Tenant{NetNS: 71}},
		{TrafficClass: api.TrafficClass{Uplink: "eth0"}}, // the default class
	}}
	for _, c := range []struct {
		of   container.Container
		rows int
		by   container.ID
	}{
		{container.Container{ID: 1, NetNS: 70}, 1, app},
		{container.Container{ID: 4, NetNS: 72}, 0, 0},
		{container.Container{ID: 5}, 0, 0}, // has ended
		{container.Container{ID: 6, NetNS: 70, HostNetwork: true}, 0, 0},
	} {
		got, by := rowsShared(r, c.of)
		if len(got.Rows) != c.rows || by != c.by {
			t.Errorf("container %d: %d rows of %d, want %d of %d", c.of.ID, len(got.Rows), by, c.rows, c.by)
		}
		// A container's view of itself excludes its neighbour.
		if own := rowsOf(r, c.of.ID); len(own.Rows) != 0 {
			t.Errorf("container %d has rows of its own: %v", c.of.ID, own.Rows)
		}
	}
}
