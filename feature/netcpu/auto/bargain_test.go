package auto

import (
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/policy"
)

// An isolation that costs its container more than others gain ends, and does not begin
// again unless more is to be gained.
func TestAutoBargain(t *testing.T) {
	const bytes = 1 << 20
	window := func(robbed, network, threads time.Duration) evidence {
		e := evidence{length: time.Second, network: network, receive: network, threads: threads, bytes: bytes}
		if robbed > 0 {
			e.victims = []victim{{"db", robbed}}
		}
		return e
	}
	server := window(50*ms, 100*ms, 0) // takes 5 % of a CPU from others
	dear := window(0, 90*ms, 200*ms)   // its thread takes 10 % more, switches included
	cheap := window(0, 90*ms, 120*ms)  // or 2 % more
	flood := window(500*ms, 600*ms, 0) // takes much more for its bytes
	var r rule
	expect := func(when string, e evidence, want role) {
		t.Helper()
		if d := r.next(e, usualSteal); d.role != want {
			t.Fatalf("%s: role %d, want %d (%s)", when, d.role, want, d.reason)
		}
	}
	expect("it robs", server, receiver)
	expect("dear", dear, receiver)
	expect("dear", dear, receiver)
	if r.bargain.extra != 100*ms || r.bargain.spared != 50*ms {
		t.Errorf("cost %v, spared %v", r.bargain.extra, r.bargain.spared)
	}
	expect("cheap between", cheap, receiver)
	for range dearFor - 1 {
		expect("dear again", dear, receiver)
	}
	expect("dear for long", dear, bystander)
	if want := "for 3 s isolation cost it 10.0 % of a CPU and spared others 5.0 %"; r.reason != want {
		t.Errorf("reason %q, want %q", r.reason, want)
	}
	for range 10 {
		expect("it robs as before", server, bystander)
	}
	expect("it robs more than isolation costs", flood, receiver)

	// The cost is remembered for ten minutes.
	r = rule{bargain: bargain{price: 1e9}}
	for range int(dearForget/time.Second) - 1 {
		expect("remembered", server, bystander)
	}
	expect("forgotten", server, receiver)

	// An isolation by an earlier agent is not judged.
	r = rule{role: receiver, patience: calmFor}
	for range 2 * dearFor {
		expect("adopted", dear, receiver)
	}
}

// The time of the packets' sender is no loss: a server robs no container while its client waits for
// the answer, also not by ksoftirqd.
func TestAutoPeers(t *testing.T) {
	theft := func(kind account.PartyKind, victim, culprit container.ID) account.Theft {
		return account.Theft{Victim: account.Party{Kind: kind, Container: victim}, Culprit: culprit}
	}
	modes := func(more map[account.Theft]time.Duration) policy.NetCPU {
		var autos Chooser
		var r readings
		var last []Choice
		for range 5 {
			last = autos.Next(r.next(more), nil, targets(veths(1), veths(2)), true, boxName)
		}
		if last[1].Mode != policy.NetCPUObserve {
			t.Errorf("the client is in the mode %s: %s", last[1].Mode, last[1].Reason)
		}
		return last[0].Mode
	}
	server := map[account.Theft]time.Duration{
		theft(account.Peer, 2, 1): 200 * ms, theft(account.Task, 1, 1): 100 * ms, theft(account.Ksoftirqd, 0, 1): 100 * ms,
	}
	if m := modes(server); m != policy.NetCPUObserve {
		t.Errorf("a server alone with its client is in the mode %s", m)
	}
	server[theft(account.Task, 3, 1)] = 50 * ms
	if m := modes(server); m != policy.NetCPUIsolate {
		t.Errorf("a server that robs a third one is in the mode %s", m)
	}
}

// The reason names what was not counted.
func TestAutoReasonPeers(t *testing.T) {
	e := evidence{length: time.Second, victims: []victim{{"db", 100 * ms}}, peers: 300 * ms}
	if s := e.takes(usualSteal); !strings.Contains(s, "senders 30.0 %") {
		t.Error(s)
	}
}
