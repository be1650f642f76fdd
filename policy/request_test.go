package policy

import (
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

const egressRequest, ingressRequest = "request of fairlead.dev/egress-mbit", "request of fairlead.dev/ingress-mbit"

func TestRequests(t *testing.T) {
	disks := Disks{"data": "/dev/vdb", "log": "/dev/vdc"}
	for _, tt := range []struct {
		name     string
		c        container.Container
		files    string
		want     Settings
		origins  []Origin
		problems string
	}{
		{name: "none"},
		{
			name:    "of its pod",
			c:       container.Container{Requests: map[string]uint64{"egress-mbit": 20}, PodRequests: map[string]uint64{"egress-mbit": 50, "ingress-mbit": 30}},
			want:    Settings{Egress: Net{Rate: 50e6}, Ingress: Net{Rate: 30e6}},
			origins: []Origin{{Key: "fairlead.net.ingress.rate", Value: "30mbit", From: ingressRequest}, {Key: "fairlead.net.rate", Value: "50mbit", From: egressRequest}},
		},
		{
			name:    "its own in the host's network",
			c:       container.Container{HostNetwork: true, Requests: map[string]uint64{"egress-mbit": 20}, PodRequests: map[string]uint64{"egress-mbit": 50}},
			want:    Settings{Egress: Net{Rate: 20e6}},
			origins: []Origin{{Key: "fairlead.net.rate", Value: "20mbit", From: egressRequest}},
		},
		{
			name: "disks, of the container alone",
			c: container.Container{
				Requests:    map[string]uint64{"data-riops": 200, "log-riops": 1, "log-wiops": 9},
				PodRequests: map[string]uint64{"data-riops": 500, "data-wiops": 300, "log-riops": 1, "log-wiops": 9},
			},
			want: Settings{IO: []IO{{Device: "/dev/vdb", Reserved: Figures{ReadIOPS: 200}}, {Device: "/dev/vdc", Reserved: Figures{ReadIOPS: 1, WriteIOPS: 9}}}},
			origins: []Origin{{Key: "fairlead.io.reserve", Value: "/dev/vdb riops=200; /dev/vdc riops=1 wiops=9",
				From: "request of fairlead.dev/data-riops, log-riops, log-wiops"}},
		},
		{
			name:     "a disk without a name",
			c:        container.Container{Requests: map[string]uint64{"gone-riops": 7}},
			problems: `fairlead.dev/gone-riops: "7": no disk has that name here any more: name it by the agent's flag --kubelet-disk`,
		},
		{
			name:     "more than a rate can be",
			c:        container.Container{PodRequests: map[string]uint64{"egress-mbit": 1e10}},
			problems: `fairlead.net.rate: "10000000000mbit": requested: 10000tbit is not between 1kbit and 1000tbit`,
		},
		{
			name:    "above files",
			files:   "match: {name: '*', runtime: '*'}\nset: {net.rate: 10mbit, net.weight: 2}\n",
			c:       container.Container{PodRequests: map[string]uint64{"egress-mbit": 50}},
			want:    Settings{Egress: Net{Rate: 50e6, Weight: 2}},
			origins: []Origin{{Key: "fairlead.net.rate", Value: "50mbit", From: egressRequest}, {Key: "fairlead.net.weight", Value: "2", From: "a.yaml", Line: 2}},
		},
		{
			name: "below annotations",
			c: container.Container{
				Labels: map[string]string{"fairlead.net.rate": "70mbit"}, Annotations: map[string]bool{"fairlead.net.rate": true},
				PodRequests: map[string]uint64{"egress-mbit": 50},
			},
			want:    Settings{Egress: Net{Rate: 70e6}},
			origins: []Origin{{Key: "fairlead.net.rate", Value: "70mbit", From: "annotation"}},
		},
		{
			name:  "where labels are denied",
			files: "labels: deny\nmatch: {name: '*', runtime: '*'}\n",
			c: container.Container{
				Labels: map[string]string{"fairlead.net.rate": "70mbit"}, PodRequests: map[string]uint64{"egress-mbit": 50},
			},
			want:     Settings{Egress: Net{Rate: 50e6}},
			origins:  []Origin{{Key: "fairlead.net.rate", Value: "50mbit", From: egressRequest}},
			problems: `fairlead.net.rate: "70mbit": is ignored: a.yaml:1 says labels: deny`,
		},
		{
			name: "a ceil holds",
			c: container.Container{
				Labels: map[string]string{"kubernetes.io/egress-bandwidth": "20M"}, Annotations: map[string]bool{"kubernetes.io/egress-bandwidth": true},
				PodRequests: map[string]uint64{"egress-mbit": 50},
			},
			want:    Settings{Egress: Net{Ceil: 20e6}},
			origins: []Origin{{Key: "fairlead.net.ceil", Value: "20M", From: "annotation"}},
			problems: "fairlead.net.rate: \"50mbit\": net.rate 50mbit is more than net.ceil 20mbit " +
				"(net.rate from request of fairlead.dev/egress-mbit, net.ceil from annotation)",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := &Policy{}
			if tt.files != "" {
				var wrong []Problem
				if p, wrong = ParseFile("a.yaml", []byte(tt.files)); wrong != nil {
					t.Fatal(wrong)
				}
			}
			got, problems, _ := p.resolve(tt.c, p.matching(tt.c), nil, requested(tt.c, disks), nil)
			testkit.Same(t, "settings", tt.want, got.Settings)
			testkit.Same(t, "origins", tt.origins, got.Origins)
			var lines []string
			for _, p := range problems {
				lines = append(lines, p.Error())
			}
			testkit.Same(t, "problems", tt.problems, strings.Join(lines, "\n"))
		})
	}
}

func FuzzDiskName(f *testing.F) {
	for _, name := range []string{"data", "nvme-0", "", "-x", "Data", "a.b", "a/b", strings.Repeat("x", 64), "ä"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if CheckDiskName(name) != nil {
			return
		}
		reads, writes := DiskResources(name)
		c := container.Container{Requests: map[string]uint64{reads: 1, writes: 2}}
		r := requested(c, Disks{name: "/dev/vdb"})
		if len(reads) > 63 || len(r.problems) > 0 || r.layer["io.reserve"].origin.Value != "/dev/vdb riops=1 wiops=2" {
			t.Errorf("%q: %q, %v, %v", name, reads, r.problems, r.layer["io.reserve"].origin)
		}
	})
}
