package blockio

import (
	"fmt"
	"strings"
	"testing"
)

// at makes an interrupt that can be moved; its count is that of one for data.
func at(number int, cpus ...int) interrupt {
	return interrupt{number: number, cpus: cpus, count: 7, movable: true}
}

func (i interrupt) fixed() interrupt              { i.movable = false; return i }
func (i interrupt) heldBy(why string) interrupt   { i.held = why; return i }
func (i interrupt) counted(n uint64) interrupt    { i.count = n; return i }
func (i interrupt) movedTo(cpus ...int) interrupt { i.moved = cpus; return i }

// The network's interrupts that come to a disk's CPUs go to others, in turn, and all others
// stay where they are. What cannot be had is said.
func TestSeparate(t *testing.T) {
	vda := device{"vda", []interrupt{at(35, 1).fixed().counted(3), at(36, 0).fixed().counted(90_000)}} // 35: its configuration
	nvme := device{"nvme0n1", []interrupt{at(50, 0).fixed(), at(51, 1).fixed()}}
	eth := device{"eth0", []interrupt{at(38, 0), at(39, 1)}}
	fixed := device{"eth1", []interrupt{at(40, 0).fixed(), at(41, 1).fixed()}}
	nic := func(irqs ...interrupt) device { return device{"eth2", irqs} }
	two, four := []int{0, 1}, []int{0, 1, 2, 3}
	for _, c := range []struct {
		name            string
		disks, networks []device
		ends            []string
		usable          []int
		want            string
		why             string
	}{
		{"two CPUs", []device{vda}, []device{eth}, nil, two, "{[{38 [1]}] [] [1]}", ""},
		{"a queue for each of four", []device{vda}, []device{nic(at(60, 0), at(61, 1), at(62, 2), at(63, 3))}, nil, four, "{[{60 [1]}] [] [1 2 3]}", ""},
		{"of two devices", []device{vda}, []device{eth, nic(at(60, 0), at(61, 1), at(62, 2), at(63, 3))}, nil, four, "{[{38 [2]} {60 [3]}] [] [1 2 3]}", ""},
		{"all on the disk's", []device{vda}, []device{nic(at(60, 0), at(61, 0), at(62, 0), at(63, 0))}, nil, four, "{[{60 [1]} {61 [2]} {62 [3]} {63 [1]}] [] [1 2 3]}", ""},
		{"on the disk's by all CPUs", []device{vda}, []device{nic(at(60, 0, 1, 2, 3))}, nil, four, "{[{60 [1]}] [] [1 2 3]}", ""},
		{"its configuration", []device{vda}, []device{nic(at(60, 0).counted(1), at(61, 1).counted(9000))}, nil, four, "{[] [] [1 2 3]}", ""},
		{"isolated CPUs", []device{vda}, []device{eth}, nil, []int{0, 3}, "{[{38 [3]}] [] [3]}", ""},
		{"moved before", []device{vda}, []device{nic(at(60, 0, 1, 2, 3).movedTo(3), at(61, 0))}, nil, four, "{[{60 [3]} {61 [1]}] [] [1 2 3]}", ""},
		{"moved before, to where another disk is served now", []device{vda, nvme}, []device{nic(at(60, 0).movedTo(1))}, nil, four, "{[{60 [2]}] [] [2 3]}", ""},
		{"moved before, for another disk", []device{vda}, []device{nic(at(60, 2).movedTo(3))}, nil, four, "{[] [] [1 2 3]}", ""},
		{"by hand", []device{vda}, []device{nic(at(60, 0).heldBy(byHand), at(61, 0), at(62, 0).heldBy(byHand), at(63, 3).heldBy(byHand))}, nil, four, "{[{61 [1]}] [] [1 2 3]}",
			"somebody has chosen the CPUs of interrupts 60,62 of eth2, which serve disks: give them others, or all (0-3), in /proc/irq/N/smp_affinity_list"},
		{"irqbalance", []device{vda}, []device{nic(at(60, 0).heldBy(byBalancing))}, []string{"veth1"}, two, "{[] [veth1] [1]}",
			"irqbalance places interrupts 60 of eth2, and disks are served by the same CPUs: stop it"},
		{"one", []device{vda}, []device{eth}, nil, []int{0}, "{[] [] []}", "the disks are served by all CPUs that may be given interrupts (0)"},
		{"a disk on all", []device{vda, nvme}, []device{eth}, nil, two, "{[] [] []}", "the disks are served by all CPUs that may be given interrupts (0-1)"},
		{"a disk without", nil, []device{eth}, nil, two, "{[] [] []}", "no disk of its reservations has interrupts of its own"},
		{"a network without", []device{vda}, nil, nil, two, "{[] [] [1]}", "no network device of this host has interrupts of its own, and no container a veth"},
		{"one that is fixed", []device{vda}, []device{eth, fixed}, nil, two, "{[{38 [1]}] [eth1] [1]}", ""},
		{"veths alone", []device{vda}, nil, []string{"veth1", "veth2"}, two, "{[] [veth1 veth2] [1]}", ""},
		{"veths, a disk on all", []device{vda, nvme}, nil, []string{"veth1"}, two, "{[] [] []}", "the disks are served by all CPUs that may be given interrupts (0-1)"},
	} {
		got, err := separate(c.disks, c.networks, c.ends, c.usable)
		if fmt.Sprint(got) != c.want || (err == nil) != (c.why == "") || err != nil && !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v, %v, want %s, %q", c.name, got, err, c.want, c.why)
		}
	}
}
