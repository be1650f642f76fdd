package isolate

import (
	"math"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/auto"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/policy"
)

// The prices of a packet in seconds on the reference kernel: half a CPU receives 266k/s by the veth's
// thread, and 175k/s if the NIC's works for it as well.
const (
	uplinkCost = 980e-9               // the NIC's poll, GRO and bridge
	vethCost   = 1280e-9              // from the host end of the veth into the socket
	recvCost   = 600e-9               // system calls
	dropCost   = 0.5 * uplinkCost     // the NIC's poll, GRO, and the decision of early drop
	plantStep  = 0.01                 // s
	ringSize   = 256                  // packets
	softMost   = 0.9 * plantStep      // of a CPU: ksoftirqd lets tasks run
	glance     = int(0.2 / plantStep) // steps
)

// plant is a model of a host in steps of 10 ms. The product's code decides about its packets. Softirqs
// run first, and the task that they interrupt is charged for them. The rest of a CPU is divided by
// weight, and a group's weight is divided between CPUs by load. Quotas throttle tasks and threads. An
// uplink's thread runs on the CPU with the most time left, unless its operator has steered it. A
// context switch is free, and there is no latency below a step. So the model shows what turns, rests
// and deferred polls cost others, but not what they gain.
type plant struct {
	plantHost
	ideal  bool    // each packet's work is done by its receiver's group, by magic,
	uplink float64 // and a packet costs the uplink this

	steps   int
	loads   [][]load  // of a step, by CPU
	idle    []float64 // by CPU, sum
	all     []float64 // of a step, by group, the uplinks' first: what it wants on all CPUs
	fetched []float64 // by queue: the part that was done
	auto    auto.Chooser
	last    work
	rests   restControl
	upRan   float64 // sum, of the uplinks' threads
	looked  []group // by tenant, at the last look around
	lookAt  float64
}

// plantHost is what a plant begins with.
type plantHost struct {
	cpus    int
	nic     []int // CPUs that the uplinks' threads may use: all, or those of RPS
	steered bool  // the latter
	tenants []plantTenant
}

// plantTenant is a container that computes on some CPUs, receives packets at one, or both.
type plantTenant struct {
	weight, quota float64 // quota in CPUs; 0: none
	computes      []int   // CPUs
	rate          float64 // packets/s
	on, every     float64 // s: packets come, or who gets none computes, for this part of a period; 0: always
	until         float64 // s: packets come before; 0: for ever
	queue, cpu    int     // CPUs of the NIC's queue and of the receiver
	closed        bool    // no packet comes before earlier ones were received

	pays         bool
	is           isolation
	pool         float64
	ring, socket float64
	served       float64 // by its task, in the last step
	admit        float64 // of a step, likewise:
	fetch, soft  float64 // what its packets want of the uplinks, and the part in softirqs
	polled, got  float64 // packets that the veth's thread and the task had time for

	work, ran, waited, received float64 // sums; work is computing without softirqs
	arrived, held               float64
	cost, own, took, robbed     float64
	robs                        []float64 // by tenant: sums of what its packets took,
	byThread, byIdle            float64   // and from others
	upCost, lastUpCost          float64
	rates                       []float64 // of pace, each 0.2 s
	paid                        []bool    // likewise
	overpaid                    bool      // paced, though all that it takes is due to it
}

// load is something that wants to run on a CPU: a tenant's task or thread, or the uplinks' thread.
type load struct {
	tenant    int // -1: the uplinks
	kind      loadKind
	queue     int // of fetching
	want, got float64
	all       float64 // what it would want of a faster CPU
}

type loadKind int

const (
	computing loadKind = iota
	receiving
	polling  // its veth
	fetching // its uplink, or all tenants'
)

func newPlant(h plantHost) *plant {
	p := &plant{
		plantHost: h, uplink: uplinkCost, loads: make([][]load, h.cpus), idle: make([]float64, h.cpus), fetched: make([]float64, h.cpus),
		all: make([]float64, len(h.tenants)+1), looked: make([]group, len(h.tenants)), last: work{at: time.Unix(1e9, 0)},
	}
	p.tenants = slices.Clone(h.tenants)
	for i := range p.tenants {
		p.tenants[i].robs = make([]float64, len(h.tenants))
	}
	return p
}

func (p *plant) now() float64  { return float64(p.steps) * plantStep }
func (p *plant) at() time.Time { return time.Unix(1e9, 0).Add(seconds(p.now())) }
func (p *plant) paying() bool {
	return slices.ContainsFunc(p.tenants, func(t plantTenant) bool { return t.pays })
}

func (t *plantTenant) pauses(now float64) bool { return t.every > 0 && math.Mod(now, t.every) >= t.on }

func (t *plantTenant) arrivals(now float64) float64 {
	if t.until > 0 && now >= t.until || t.pauses(now) {
		return 0
	}
	if t.closed {
		return min(t.rate*plantStep, max(0, 1.2*t.served+16-t.ring-t.socket))
	}
	return t.rate * plantStep
}

func (p *plant) add(cpu int, l load) {
	if l.want > 0 {
		l.all, l.want = l.want, min(l.want, plantStep)
		p.loads[cpu] = append(p.loads[cpu], l)
		p.all[l.tenant+1] += l.want
	}
}

// room returns the CPU of an uplink's thread in this step: that with most time left after the softirqs.
func (p *plant) room(soft []float64) (best int) {
	most := -1.0
	for _, c := range p.nic {
		left := plantStep - soft[c]
		for _, l := range p.loads[c] {
			left -= l.want
		}
		if left = max(0, left); left > most+1e-9 {
			best, most = c, left
		}
	}
	return best
}

// step lets 10 ms pass.
func (p *plant) step() {
	threads := p.paying() && !p.rests.rests
	soft, up := make([]float64, p.cpus), make([]float64, p.cpus) // by queue: what softirqs and threads want
	for c := range p.loads {
		p.loads[c] = p.loads[c][:0]
	}
	clear(p.all)
	for i := range p.tenants {
		t := &p.tenants[i]
		if p.steps%10 == 0 {
			t.pool = t.quota*0.1 + min(0, t.pool)
		}
		n := t.arrivals(p.now())
		t.arrived += n
		t.admit, t.soft, t.fetch, t.polled, t.got = n, 0, 0, 0, 0
		if t.pays || p.ideal {
			t.admit = min(n, ringSize+1.2*t.served-t.ring)
			if r := t.is.pacing.rate; r > 0 {
				t.admit = min(t.admit, r*plantStep)
			}
			t.admit = max(0, t.admit)
			t.held += n - t.admit
		}
		t.fetch = t.admit*p.uplink + (n-t.admit)*dropCost
		if !t.pays && !p.ideal {
			t.fetch += t.admit * vethCost
		}
		held := t.quota > 0 && t.pool <= 0
		switch {
		case p.ideal && held:
			t.admit = 0
		case p.ideal: // below
		case threads:
			up[t.queue] += t.fetch
		default:
			t.soft = t.fetch
			soft[t.queue] += t.soft
		}
		if held {
			continue
		}
		for _, c := range t.computes {
			if t.rate == 0 && t.pauses(p.now()) {
				break
			}
			p.add(c, load{tenant: i, kind: computing, want: plantStep})
		}
		if t.pays || p.ideal {
			p.add(t.cpu, load{tenant: i, kind: polling, want: (t.ring + t.admit) * vethCost})
		}
		p.add(t.cpu, load{tenant: i, kind: receiving, want: (t.socket + t.admit) * recvCost})
	}
	for i, t := range p.tenants {
		if p.ideal && t.admit*p.uplink > 0 {
			p.add(p.room(soft), load{tenant: i, kind: fetching, want: t.admit * p.uplink})
		}
	}
	for q, want := range up {
		if want > 0 {
			p.add(p.room(soft), load{tenant: -1, kind: fetching, queue: q, want: want})
		}
	}
	for c := range soft {
		p.divide(c, plantStep-min(soft[c], softMost))
		p.book(c, soft[c])
	}
	for i := range p.tenants {
		p.receive(i, soft[p.tenants[i].queue], up[p.tenants[i].queue])
	}
	p.steps++
}

// divide gives the loads of a CPU some time, by weight.
func (p *plant) divide(cpu int, left float64) {
	loads := p.loads[cpu]
	weigh := func(l *load) (each float64) {
		open, here := 0.0, 0.0
		for i := range loads {
			if o := &loads[i]; o.tenant == l.tenant {
				if here += o.want; o.got < o.want {
					open++
				}
			}
		}
		of := 1024.0 // the uplinks'
		if l.tenant >= 0 {
			of = p.tenants[l.tenant].weight
		}
		return of * here / p.all[l.tenant+1] / open
	}
	weights := make([]float64, len(loads))
	for left > 1e-9 {
		sum := 0.0
		for i := range loads {
			if weights[i] = 0; loads[i].got < loads[i].want {
				weights[i] = weigh(&loads[i])
				sum += weights[i]
			}
		}
		if sum == 0 {
			break
		}
		had := left
		for i := range loads {
			if l := &loads[i]; weights[i] > 0 {
				part := min(had*weights[i]/sum, l.want-l.got)
				l.got += part
				left -= part
			}
		}
	}
	p.idle[cpu] += max(0, left)
}

// book counts what the loads of a CPU had, and what softirqs took from them.
func (p *plant) book(cpu int, soft float64) {
	var running float64
	for _, l := range p.loads[cpu] {
		running += l.got
	}
	part := 0.0 // of the softirqs that this CPU had time for
	if soft > 0 {
		part = min(1, softMost/soft)
	}
	whole := plantStep - soft*part // for tasks
	for _, l := range p.loads[cpu] {
		if l.tenant < 0 {
			p.upRan += l.got
			p.fetched[l.queue] = l.got / l.all
			continue
		}
		t := &p.tenants[l.tenant]
		lost := l.got / whole * soft * part // softirqs interrupt all that run in proportion
		t.ran += l.got + lost
		t.waited += l.want - l.got
		t.pool -= l.got + lost
		switch l.kind {
		case computing:
			t.work += l.got
		case receiving:
			t.got = l.got / recvCost
		case polling:
			t.polled = l.got / vethCost
			t.cost, t.own = t.cost+l.got, t.own+l.got
		case fetching:
			t.admit *= l.got / l.all
		}
		if lost == 0 {
			continue
		}
		for i := range p.tenants {
			culprit := &p.tenants[i]
			if culprit.soft == 0 || culprit.queue != cpu {
				continue
			}
			s := culprit.soft / soft * lost
			if i == l.tenant {
				culprit.own += s
			} else {
				culprit.took, t.robbed = culprit.took+s, t.robbed+s
			}
			culprit.robs[l.tenant] += s
		}
	}
	for i := range p.tenants {
		if t := &p.tenants[i]; t.soft > 0 && t.queue == cpu {
			t.cost += t.soft * part
			t.byIdle += t.soft * part * (1 - min(1, running/whole))
			t.admit *= part
		}
	}
}

// receive takes the packets of a tenant as far as there was time.
func (p *plant) receive(i int, soft, up float64) {
	t := &p.tenants[i]
	if up > 0 {
		spent := t.fetch * p.fetched[t.queue]
		t.upCost, t.cost, t.byThread = t.upCost+spent, t.cost+spent, t.byThread+spent
		t.admit *= p.fetched[t.queue]
	}
	n := t.admit
	if t.pays || p.ideal {
		t.ring += n
		n = min(t.ring, t.polled)
		t.ring = min(t.ring-n, ringSize)
	}
	t.socket += n
	t.served = min(t.socket, t.got)
	t.received += t.served
	t.socket = min(t.socket-t.served, ringSize)
}

func seconds(s float64) time.Duration { return time.Duration(math.Round(s * 1e9)) }

// run lets some time pass, and has the product decide as its loops do.
func (p *plant) run(length float64) *plant {
	for n := int(length/plantStep + 0.5); n > 0; n-- {
		if p.step(); p.ideal || p.steps%glance != 0 {
			continue
		}
		if p.steps%(5*glance) == 0 || p.auto.Alarm(func() (account.Reading, error) { return p.reading(), nil }) {
			p.choose()
		}
		if p.paying() {
			p.bound()
		} else {
			p.last, p.lookAt, p.rests = work{at: p.at()}, 0, restControl{}
		}
		for i := range p.tenants {
			t := &p.tenants[i]
			t.rates, t.paid = append(t.rates, t.is.pacing.rate), append(t.paid, t.pays)
			t.is.flow = flow{own: seconds(t.ran), Counters: drop.Counters{Arrived: uint64(t.arrived), Held: uint64(t.held)}}
			t.lastUpCost = t.upCost
		}
	}
	return p
}

// reading is what the accounts would say.
func (p *plant) reading() account.Reading {
	r := account.Reading{Taken: p.at(), Accounts: make(map[container.ID]account.Account), Thefts: make(map[account.Pair]time.Duration)}
	for i, t := range p.tenants {
		id, a := container.ID(i+1), account.Account{Own: seconds(t.own), Took: seconds(t.took), Robbed: seconds(t.robbed)}
		a.Receive[account.UDP].CPU = seconds(t.cost)
		r.Accounts[id] = a
		from := func(kind account.PartyKind, of container.ID, s float64) {
			if s > 0 {
				r.Thefts[account.Pair{Victim: account.Party{Container: of, Kind: kind}, Culprit: id}] = seconds(s)
			}
		}
		from(account.NAPI, account.System, t.byThread)
		from(account.Idle, account.System, t.byIdle)
		for of, s := range t.robs {
			from(account.Task, container.ID(of+1), s)
		}
	}
	return r
}

// choose decides which containers pay.
func (p *plant) choose() {
	of := make([]policy.Target, len(p.tenants))
	for i := range of {
		of[i].Container = container.Container{ID: container.ID(i + 1), Interfaces: []container.Interface{{Kind: "veth", Host: container.HostEnd{NetNS: 1}}}}
		of[i].Settings = policy.Settings{NetCPU: policy.NetCPUIsolate}
	}
	for i, c := range p.auto.Next(p.reading(), of, true, container.ID.String) {
		if t := &p.tenants[i]; t.pays != (c.Mode == policy.NetCPUIsolate) {
			t.pays, t.is, t.ring = !t.pays, isolation{}, 0
		}
	}
}

// bound bounds what passes the uplinks, as pace does.
func (p *plant) bound() {
	nic := container.Device{Index: 1}
	w := work{at: p.at(), ran: map[container.Device]time.Duration{nic: seconds(p.upRan)}, idle: make(map[int]time.Duration)}
	for cpu, s := range p.idle {
		w.idle[cpu] = seconds(s)
	}
	for _, t := range p.tenants {
		if !t.pays {
			w.others += uint64(t.arrived)
		}
	}
	if p.rests.rests || float64(w.ranSince(p.last, nic)) > law.Least*float64(w.at.Sub(p.last.at)) {
		w.heavy = map[container.Device]time.Time{nic: w.at}
	}
	u := w.after(p.last, p.nic)
	p.last = w
	all := paceWindow{arrived: u.others, passed: u.others}
	windows := make([]paceWindow, len(p.tenants))
	for i, t := range p.tenants {
		if f := t.is.flow; t.pays && f.own > 0 {
			win := paceWindow{length: u.length}
			win.count(f, flow{Counters: drop.Counters{Arrived: uint64(t.arrived), Held: uint64(t.held)}})
			if u.heavy {
				win.own = max(1, seconds(t.ran)-f.own)
			}
			all.arrived, all.passed = all.arrived+win.arrived, all.passed+win.passed
			windows[i] = win
		}
	}
	paced := false
	for i := range p.tenants {
		if t := &p.tenants[i]; t.pays {
			t.is.quota = t.quota
			before, due := t.is.pacing.rate, t.is.dueIn(u.length)
			rate := t.is.paced(windows[i], all, u, law.Flood)
			takes := windows[i].own + seconds(t.upCost-t.lastUpCost)
			t.overpaid = t.overpaid || rate > 0 && (before == 0 || rate < before) && takes < due*9/10
			paced = paced || rate > 0
		}
	}
	flood := paced || u.perSecond(all.arrived) >= law.Flood
	if u.heavy && flood {
		p.lookAround()
	}
	p.rests.next(restWindow{length: u.length, idle: u.idle, ran: u.ran, flood: flood})
}

// lookAround computes the CPU time due to each container, once a second.
func (p *plant) lookAround() {
	length := seconds(p.now() - p.lookAt)
	if length < law.Window {
		return
	}
	p.lookAt = p.now()
	short := make([]group, len(p.tenants))
	for i, t := range p.tenants {
		now := group{ran: seconds(t.ran), waited: seconds(t.waited), quota: t.quota}
		if g, goes := now.short(p.looked[i], length); goes && length <= 2*law.Window {
			g.weight = uint64(t.weight)
			short[i] = g
		}
		p.looked[i] = now
	}
	for i := range p.tenants {
		t := &p.tenants[i]
		took, others := t.is.took, slices.Clone(short)
		others[i].weight = 0 // a container is not its own neighbour
		t.is.took, t.is.due = 0, due(took, uint64(t.weight), others).Seconds()/length.Seconds()
	}
}
