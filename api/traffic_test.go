package api

import (
	"testing"
	"time"
)

func TestTrafficAfter(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	class := func(bytes, packets, drops uint64) TrafficClass {
		return TrafficClass{Container: 1, Uplink: "eth0", Direction: "egress", Guaranteed: 8000, Bytes: bytes, Packets: packets, Borrowed: packets / 2, Drops: drops, BacklogBytes: 500}
	}
	before := Traffic{Taken: at, Classes: []TrafficClass{class(1000, 10, 1), {Uplink: "eth0", Direction: "egress"}}}
	for _, tt := range []struct {
		name string
		now  TrafficClass
		want TrafficClass
	}{
		{"the same class", class(5000, 30, 1), TrafficClass{Bytes: 4000, Packets: 20, Borrowed: 10, Achieved: 16_000, Drain: 0.25}},
		{"made anew", class(800, 4, 0), TrafficClass{Bytes: 800, Packets: 4, Borrowed: 2, Achieved: 3200, Drain: 0.5}},
		{"another uplink", TrafficClass{Container: 1, Uplink: "eth1", Direction: "egress", Bytes: 2000, Packets: 2}, TrafficClass{Bytes: 2000, Packets: 2, Achieved: 8000}},
	} {
		after := Traffic{Taken: at.Add(2 * time.Second), Classes: []TrafficClass{tt.now}}
		got := after.After(before)
		c := got.Classes[0]
		if !got.Since.Equal(at) || c.Bytes != tt.want.Bytes || c.Packets != tt.want.Packets || c.Borrowed != tt.want.Borrowed || c.Drops != 0 || c.Achieved != tt.want.Achieved || c.Drain != tt.want.Drain {
			t.Errorf("%s: %+v, want %+v", tt.name, c, tt.want)
		}
		if after.Classes[0].Bytes != tt.now.Bytes {
			t.Errorf("%s: After has changed the reading", tt.name)
		}
	}
	if got := before.After(before); got.Classes[0].Achieved != 0 {
		t.Errorf("over no time: %+v", got.Classes[0])
	}
}
