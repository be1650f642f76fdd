package overlay

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/api"
)

// Each number of a report is one sample; samples of one name have the same label names, and
// distinct labels.
func TestMetrics(t *testing.T) {
	way := func(fast, slow uint64) api.OverlayWay {
		return api.OverlayWay{OverlayPackets: api.OverlayPackets{Fast: fast, FastBytes: 10 * fast, Slow: slow, SlowBytes: 10 * slow}}
	}
	s := snapshot(api.Overlay{
		Networks: []api.OverlayNetwork{
			{Network: "flannel.1", Kind: "vxlan", State: api.OverlayOn, Containers: 3, Accelerated: 2, Generation: 5,
				Tables: []api.OverlayTable{{Kind: "flow", Entries: 7, Capacity: 100}}, Evictions: []api.OverlayEviction{{Cause: "route", Times: 4}},
				Egress: api.OverlayTraffic{OverlayPackets: api.OverlayPackets{Fast: 90, FastBytes: 900, Slow: 10, SlowBytes: 100}, Saved: 400,
					Reasons: []api.OverlayReason{{Reason: api.SlowLease, Packets: 10}}}},
			{Network: "wg0", Kind: "wireguard", State: api.OverlayLeftAlone, Containers: 1},
		},
		Containers: []api.OverlayContainer{{Container: 7, Ends: []api.OverlayEnd{
			{Network: "flannel.1", Device: "eth0", Egress: way(8, 1), Ingress: way(2, 2)}, {Network: "flannel.1", Device: "eth1", Ingress: way(4, 0)},
		}}},
	})
	var got []string
	labels, series := map[string]string{}, map[string]bool{}
	for _, x := range s.Samples {
		var names, values []string
		for _, l := range x.Labels {
			names, values = append(names, l.Name), append(values, l.Name+"="+l.Value)
		}
		if had, known := labels[x.Name]; known && had != strings.Join(names, ",") {
			t.Errorf("%s has the labels %s, and %v", x.Name, had, names)
		}
		labels[x.Name] = strings.Join(names, ",")
		one := fmt.Sprintf("%s{%d %s %s}", x.Name, x.Container, x.Device, strings.Join(values, " "))
		if series[one] {
			t.Errorf("%s comes twice", one)
		}
		series[one] = true
		got = append(got, fmt.Sprintf("%s %v", one, x.Value))
		if s.Help[x.Name] == "" {
			t.Errorf("%s has no help", x.Name)
		}
	}
	guide, err := os.ReadFile("../../docs/overlay.md")
	must(t, err)
	for name := range s.Help {
		if !strings.Contains(string(guide), "`fairlead_"+name+"{") {
			t.Errorf("docs/overlay.md has no fairlead_%s", name)
		}
		if _, known := labels[name]; !known {
			t.Errorf("help for %s, which there is not", name)
		}
	}
	slices.Sort(got)
	want := []string{
		"overlay_accelerated_containers{0 flannel.1 } 2",
		"overlay_bytes_total{0 flannel.1 direction=egress path=fast} 900",
		"overlay_bytes_total{0 flannel.1 direction=egress path=slow} 100",
		"overlay_bytes_total{0 flannel.1 direction=ingress path=fast} 0",
		"overlay_bytes_total{0 flannel.1 direction=ingress path=slow} 0",
		"overlay_capacity_entries{0 flannel.1 kind=flow} 100",
		"overlay_container_bytes_total{7 flannel.1 direction=egress path=fast} 80",
		"overlay_container_bytes_total{7 flannel.1 direction=egress path=slow} 10",
		"overlay_container_bytes_total{7 flannel.1 direction=ingress path=fast} 60",
		"overlay_container_bytes_total{7 flannel.1 direction=ingress path=slow} 20",
		"overlay_container_packets_total{7 flannel.1 direction=egress path=fast} 8",
		"overlay_container_packets_total{7 flannel.1 direction=egress path=slow} 1",
		"overlay_container_packets_total{7 flannel.1 direction=ingress path=fast} 6",
		"overlay_container_packets_total{7 flannel.1 direction=ingress path=slow} 2",
		"overlay_containers{0 flannel.1 } 3",
		"overlay_containers{0 wg0 } 1",
		"overlay_entries{0 flannel.1 kind=flow} 7",
		"overlay_evictions_total{0 flannel.1 cause=route} 4",
		"overlay_generation{0 flannel.1 } 5",
		"overlay_network{0 flannel.1 kind=vxlan state=on} 1",
		"overlay_network{0 wg0 kind=wireguard state=left alone} 1",
		"overlay_packets_total{0 flannel.1 direction=egress path=fast} 90",
		"overlay_packets_total{0 flannel.1 direction=egress path=slow} 10",
		"overlay_packets_total{0 flannel.1 direction=ingress path=fast} 0",
		"overlay_packets_total{0 flannel.1 direction=ingress path=slow} 0",
		"overlay_saved_seconds{0 flannel.1 direction=egress} 4e-07",
		"overlay_slow_packets_total{0 flannel.1 direction=egress reason=lease} 10",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("samples (-want +got):\n%s", diff)
	}
}
