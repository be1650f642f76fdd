package network

import (
	"testing"

	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

func TestWay(t *testing.T) {
	ours := func(name string, stage qdisc.Stage) qdisc.Hooked {
		return qdisc.Hooked{Kind: "tcx", Program: 1, Ours: true, Stage: stage, Name: name}
	}
	send, arrive := ours("ov_send", hook.Redirect), ours("ov_arrive", hook.Observe)
	tcx, filter := qdisc.Hooked{Kind: "tcx", Program: 7}, qdisc.Hooked{Kind: "u32"}
	for _, c := range []struct {
		name   string
		change func(*EndState)
		in     Mode
		whyIn  string
		whyOut string // "": it may leave
	}{
		{"nothing else is there", func(*EndState) {}, Peer, "", ""},
		{"ours are not there yet", func(e *EndState) { e.Host = qdisc.State{Root: "noqueue"} }, Peer, "", ""},
		{"netkit", func(e *EndState) { e.Kind = "netkit" }, Peer, "", ""},
		{"netkit of layer 3", func(e *EndState) { e.Kind, e.Ether = "netkit", false }, Slow, Kind, Kind},
		{"macvlan", func(e *EndState) { e.Kind = "macvlan" }, Slow, Kind, Kind},
		{"made by a container", func(e *EndState) { e.Trusted = false }, Slow, Untrusted, Untrusted},
		{"the bridge is shaped", func(e *EndState) { e.Master.Root = "htb" }, Slow, Shaped, Shaped},
		{"programs at the bridge", func(e *EndState) { e.Master.Egress = []qdisc.Hooked{tcx} }, Slow, Filtered, Filtered},
		{"ours at the bridge", func(e *EndState) { e.Master.Egress = []qdisc.Hooked{ours("stamp", 0)} }, Peer, "", ""},
		{"a ceil for what it receives", func(e *EndState) { e.Host.Root = "htb" }, End, Shaped, ""},
		{"somebody's program at egress", func(e *EndState) { e.Host.Egress = append(e.Host.Egress, tcx) }, End, Filtered, ""},
		{"fairlead's program at egress", func(e *EndState) { e.Host.Egress = append(e.Host.Egress, ours("learn", hook.Learn)) }, End, Filtered, ""},
		{"a thread", func(e *EndState) { e.Threaded = true }, End, Thread, ""},
		{"XDP inside", func(e *EndState) { e.XDP = true }, End, XDP, ""},
		{"watched", func(e *EndState) { e.Watched = true }, End, Watched, ""},
		{"a program before ours", func(e *EndState) { e.Host.Ingress = []qdisc.Hooked{tcx, send} }, Peer, "", ""},
		{"fairlead's before ours", func(e *EndState) { e.Host.Ingress = []qdisc.Hooked{ours("stamp", hook.Stamp), send} }, Peer, "", ""},
		{"a program behind ours", func(e *EndState) { e.Host.Ingress = []qdisc.Hooked{send, tcx} }, Peer, "", Filtered},
		{"a filter behind ours", func(e *EndState) { e.Host.Ingress = []qdisc.Hooked{send, filter} }, Peer, "", Filtered},
		{"a filter before ours", func(e *EndState) { e.Host.Ingress = []qdisc.Hooked{filter, send} }, Peer, "", ""},
		{"a filter, ours are not there yet", func(e *EndState) { e.Host.Ingress = []qdisc.Hooked{tcx, filter} }, Peer, "", Filtered},
		{"a program, ours are not there yet", func(e *EndState) { e.Host.Ingress = []qdisc.Hooked{tcx} }, Peer, "", ""},
		{"a ceil for what it sends", func(e *EndState) { e.Host.Ingress = []qdisc.Hooked{ours("inbound", hook.Ceil), send} }, Peer, "", Shaped},
		{"both directions", func(e *EndState) { e.Host = qdisc.State{Root: "tbf", Ingress: []qdisc.Hooked{send, filter}} }, End, Shaped, Filtered},
	} {
		e := EndState{
			Kind: "veth", Ether: true, Trusted: true, Send: "ov_send", Arrive: "ov_arrive",
			Host:   qdisc.State{Root: "noqueue", Ingress: []qdisc.Hooked{send}, Egress: []qdisc.Hooked{arrive}},
			Master: qdisc.State{Root: "noqueue"},
		}
		c.change(&e)
		w := Way(e)
		if w.In != c.in || w.WhyIn.Word != c.whyIn || w.Out != (c.whyOut == "") || w.WhyOut.Word != c.whyOut {
			t.Errorf("%s: %+v, want in by %s (%q), out %q", c.name, w, c.in, c.whyIn, c.whyOut)
		}
	}
}
