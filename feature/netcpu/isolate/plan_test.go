package isolate

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// same compares the settings of a plan.
func same(t *testing.T, plan []journal.Setting, want ...string) {
	t.Helper()
	var got []string
	for _, s := range plan {
		got = append(got, s.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("plan (-want +got):\n%s", diff)
	}
}

// A device in an invalid namespace has the inode 0.
func TestPlanPolling(t *testing.T) {
	ns := new(netdev.NS)
	two := []receiveQueue{{"00000000,00000003", "0"}, {"1", "1"}}
	for _, tt := range []struct {
		name  string
		d     device
		shape shape
		want  []string
	}{
		{"an uplink", device{ns: ns, index: 2, rps: two}, single, []string{"rps 0/2/0 = 00000000,00000000", "rfs 0/2/0 = 0", "rps 0/2/1 = 0", "rfs 0/2/1 = 0"}},
		{"an uplink without queues", device{ns: ns, index: 2}, single, nil},
		{
			"a veth, single packets", device{ns: ns, index: 3, rps: two[1:], tso: ns.Offload(9, netdev.TSO)}, single,
			[]string{"offload 0/3/gro = " + netdev.GRO.On(), "rps 0/3/0 = 0", "rfs 0/3/0 = 0", "offload 0/9/tso = off"},
		},
		{"a veth, super-packets", device{ns: ns, index: 3, tso: ns.Offload(9, netdev.TSO)}, super, []string{"offload 0/3/gro = " + netdev.GRO.On()}},
	} {
		t.Run(tt.name, func(t *testing.T) { same(t, tt.d.polling(tt.shape), tt.want...) })
	}
}

func TestPlanPlacing(t *testing.T) {
	th := sched.Thread{TID: 7, Start: 70}
	hybrid := cgroup.Layout{CPU: "/cpu", CPUSet: "/cpuset", V2: "/unified"}
	v2 := cgroup.Layout{CPU: "/unified", CPUSet: "/unified", V2: "/unified"}
	for _, tt := range []struct {
		name   string
		layout cgroup.Layout
		at     place
		want   []string
	}{
		{"hybrid", hybrid, place{group: "/cpu/web", cpuset: "/cpuset/web"},
			[]string{"kthread 7:70:/cpu = /cpu/web", "kthread 7:70:/cpuset = /cpuset/web"}},
		{"v2", v2, place{group: "/unified/web/fairlead", child: true, cpuset: "/unified/web"},
			[]string{"group /unified/web/fairlead = present", "file /unified/web/fairlead/cgroup.freeze = 1", "kthread 7:70:/unified = /unified/web/fairlead"}},
		{"no cpuset", hybrid, place{group: "/cpu/web"}, []string{"kthread 7:70:/cpu = /cpu/web"}},
		{"uplinks on hybrid", hybrid, place{group: "/cpu/fairlead-uplink-1", child: true},
			[]string{"group /cpu/fairlead-uplink-1 = present", "kthread 7:70:/cpu = /cpu/fairlead-uplink-1"}},
	} {
		t.Run(tt.name, func(t *testing.T) { same(t, placing("/proc", tt.layout, th, tt.at), tt.want...) })
	}
	same(t, pacing("/proc", th, "3000000", "15"), "slice 7:70 = 100000", "nice 7:70 = 15")
	same(t, pacing("/proc", th, sched.NoSlice, "-5"), "nice 7:70 = -5")
	same(t, pacing("/proc", th, sched.NoSlice, ""))
}

// Threads stay where RPS put the packets of a device, if it did so for all of its queues, and where
// they can.
func TestPlanSteering(t *testing.T) {
	affinity := sched.Affinity("/proc", sched.Thread{TID: 7, Start: 70})
	for _, tt := range []struct {
		name  string
		given []string // masks of the queues
		may   []int
		want  []string
	}{
		{"one queue", []string{"2"}, []int{0, 1, 2}, []string{"affinity 7:70 = 1"}},
		{"two queues", []string{"5", "00000001,00000001"}, []int{0, 1, 2, 32}, []string{"affinity 7:70 = 0,2,32"}},
		{"one without RPS", []string{"2", "0"}, []int{0, 1}, nil},
		{"offline", []string{"4"}, []int{0, 1}, nil},
		{"some offline", []string{"6"}, []int{0, 1}, []string{"affinity 7:70 = 1"}},
		{"all", []string{"3"}, []int{0, 1}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var d device
			for _, mask := range tt.given {
				d.rps = append(d.rps, receiveQueue{mask: "0", given: mask})
			}
			cpus, err := d.steered()
			must(t, err)
			same(t, steering(affinity, tt.may, cpus), tt.want...)
		})
	}
	if _, err := (device{rps: []receiveQueue{{"0", "x"}}}).steered(); err == nil {
		t.Error("a mask that is none is taken")
	}
}
