package account

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

// memory is how much each window counts relative to the next. The speed of a virtual machine differs
// from window to window by more than prices change, so that several have to count.
const memory = 0.8

// A price that differs by a factor of anew from what was known, in a window with at least few packets
// of that container, is another one: earlier windows count no more.
const anew = 1.5

// count is how many packets the kernel itself has counted at the devices of one container.
type count struct{ in, out uint64 } // to and from the container

func (c count) since(was count) count {
	if c.in < was.in || c.out < was.out {
		return count{} // a device has been replaced
	}
	return count{c.in - was.in, c.out - was.out}
}

// counts are those of all containers that have such devices.
type counts map[container.ID]count

func (cs counts) since(was counts) counts {
	grown := make(counts, len(cs))
	for id, c := range cs {
		if w, ok := was[id]; ok {
			grown[id] = c.since(w)
		}
	}
	return grown
}

// estimate adds up the work between windows, in which no program sees packets: what the packets cost
// in the last windows, times the packets that the kernel has counted since. Where it counts none
// for a container (the host's network, macvlan, the loopback device, System), the work of the
// windows is taken to have gone on. The sum is what softirqs of packets are measured to take then: the
// programs' own time is a part of the prices, and not of that. Its zero value is ready.
type estimate struct {
	recent          map[container.ID]*recent
	softirq, thread time.Duration
	inThreads       float64 // the part of the work that the last window saw in threads

	all, packets float64 // ns of the last windows, and of that in softirqs of packets
	own          float64 // ns of the programs in the price of each packet, in the last gap that was measured

	// What prices have said of the gaps of the last time that was not there, in ns, and of how many packets.
	excess, gaps float64
}

// programs returns the time in ns that the programs take for a packet that they see, as long as the
// machine is as it was; 0: not known. One gap shows little: from second to second the machine's speed
// changes by more.
func (e *estimate) programs() float64 { return max(0, e.excess/max(e.gaps, 1)) }

// recent is what the last windows have shown of one container, and what the gaps were charged by it. Older
// windows count less.
type recent struct {
	sums
	extra   sums // of all gaps
	in, out ratio
	length  float64 // of the windows, in ns
	due     counted
}

// amount is Work with fractions: a window may count for a part, and a gap may have less than one packet,
// and many gaps some.
type amount struct{ ns, packets, bytes float64 }

func (a *amount) plus(b amount, f float64) {
	a.ns, a.packets, a.bytes = a.ns+b.ns*f, a.packets+b.packets*f, a.bytes+b.bytes*f
}

func (a amount) work() Work {
	return Work{time.Duration(a.ns), uint64(math.Round(a.packets)), uint64(math.Round(a.bytes))}
}

// sums is an Account in amounts, with its other parts in a Reading.
type sums struct {
	receive, send     [Protocols]amount
	own, took, robbed float64
	byCPU             []float64
	thefts            map[Party]float64 // of the container's packets, by victim
}

// sumsOf returns what a window shows of a container. The programs have taken off own for each packet.
func sumsOf(a Account, byCPU []time.Duration, own float64) (s sums) {
	for i := range Protocols {
		in, out := a.Receive[i], a.Send[i]
		s.receive[i] = amount{float64(in.CPU), float64(in.Packets), float64(in.Bytes)}
		s.send[i] = amount{float64(out.CPU), float64(out.Packets), float64(out.Bytes)}
	}
	s.own, s.took = float64(a.Own), float64(a.Took)
	for _, d := range byCPU {
		s.byCPU = append(s.byCPU, float64(d))
	}
	s.thefts = make(map[Party]float64)
	s.lower(-own)
	return s
}

// plus adds other sums, which have happened so many times: what was received, and sent, and the rest.
func (s *sums) plus(b sums, receive, send, rest float64) {
	for i := range Protocols {
		s.receive[i].plus(b.receive[i], receive)
		s.send[i].plus(b.send[i], send)
	}
	if rest == 0 {
		return
	}
	s.own, s.took, s.robbed = s.own+b.own*rest, s.took+b.took*rest, s.robbed+b.robbed*rest
	s.byCPU = append(s.byCPU, make([]float64, max(0, len(b.byCPU)-len(s.byCPU)))...)
	for cpu, ns := range b.byCPU {
		s.byCPU[cpu] += ns * rest
	}
	if s.thefts == nil {
		s.thefts = make(map[Party]float64)
	}
	for victim, ns := range b.thefts {
		s.thefts[victim] += ns * rest
	}
}

// lower takes a time in ns off for each packet. The gap may have had other traffic than the windows, and
// a machine of another speed: half of the work stays, and twice is the most. Whole numbers add up.
func (s *sums) lower(each float64) {
	for i := range Protocols {
		for _, a := range []*amount{&s.receive[i], &s.send[i]} {
			a.ns = math.Trunc(min(max(a.ns-each*a.packets, a.ns/2), 2*a.ns))
		}
	}
}

func amounts(of [Protocols]amount) (sum amount) {
	for _, a := range of {
		sum.plus(a, 1)
	}
	return sum
}

func (s *sums) ns() float64 { return amounts(s.receive).ns + amounts(s.send).ns }

func (s *sums) packets() float64 { return amounts(s.receive).packets + amounts(s.send).packets }

// price is the time of a packet in ns.
func (s *sums) price() float64 { return s.ns() / max(s.packets(), 1) }

// ratio compares the packets of windows as the programs and as the kernel count them: GRO and GSO
// make them differ. The windows' edges disturb it, so it has a longer memory than the price.
type ratio struct{ seen, counted float64 }

func (r *ratio) see(seen float64, counted uint64) {
	r.seen, r.counted = r.seen*memory+seen, r.counted*memory+float64(counted)
}

// counted is what the kernel has counted of a container's work, in a time that no program saw.
type counted struct{ in, out, length float64 }

func (c *counted) add(n count, length time.Duration) {
	c.in += float64(n.in)
	c.out += float64(n.out)
	c.length += float64(length)
}

// window is what one window has shown.
type window struct {
	seen   Reading // the difference of two readings
	length time.Duration
	counts counts        // in the window
	whole  time.Duration // of seen, in softirqs of packets
	own    float64       // ns that the programs have taken off for each packet
}

// of returns what is known of a container.
func (e *estimate) of(id container.ID) *recent {
	if e.recent == nil {
		e.recent = make(map[container.ID]*recent)
	}
	if e.recent[id] == nil {
		e.recent[id] = new(recent)
	}
	return e.recent[id]
}

// see takes up a window.
func (e *estimate) see(w window) {
	now := make(map[container.ID]sums)
	for id, a := range w.seen.Accounts {
		now[id] = sumsOf(a, w.seen.ByCPU[id], w.own)
	}
	for of, d := range w.seen.Thefts {
		if culprit, is := now[of.Culprit]; is {
			culprit.thefts[of.Victim] = float64(d)
		}
	}
	for id, s := range now {
		e.of(id).see(id, s, w)
	}
	all := w.seen.Softirq + w.seen.Thread
	if all == 0 {
		return
	}
	e.inThreads = float64(w.seen.Thread) / float64(all)
	part := w.part()
	e.all, e.packets = e.all*memory+float64(all)*part, e.packets*memory+float64(w.whole)*part
}

// part is how much a window counts for its length. A phase of ten seconds is no better a sample of
// what comes next than a window is, and may have seen other traffic: it counts as much as the
// shortest window.
func (w window) part() float64 { return min(1, float64(shortest)/float64(max(w.length, 1))) }

// see adds what a window shows of the container.
func (r *recent) see(id container.ID, now sums, w window) {
	n, counted := w.counts[id]
	if now.packets() == 0 && n == (count{}) && r.in.counted+r.out.counted > 0 {
		return // its price stays
	}
	keep, part := memory, w.part()
	if was := r.price(); now.packets() >= few && (now.price() > was*anew || now.price() < was/anew) {
		keep = 0
	}
	was := r.sums
	r.sums = sums{}
	r.plus(was, keep, keep, keep)
	r.plus(now, part, part, part)
	if counted {
		r.in.see(amounts(now.receive).packets, n.in)
		r.out.see(amounts(now.send).packets, n.out)
	}
	r.length = r.length*keep + float64(w.length)*part
}

// measure sets own by what the packets of a gap cost in windows, and by what the softirqs of packets took
// in the gap. It is the same for each packet, whatever that costs, as programs run for each. What prices
// have of interrupts before softirqs and of threads contains none of it.
func (e *estimate) measure(counts counts, length, took time.Duration) {
	var expected, packets float64
	for id, r := range e.recent {
		n := counts[id]
		if r.ns() == 0 && n.in+n.out >= few {
			return // somebody's packets took time, and their price is not known
		}
		in, out := r.factors(counted{float64(n.in), float64(n.out), float64(length)})
		receive, send := amounts(r.receive), amounts(r.send)
		expected += receive.ns*in + send.ns*out
		packets += receive.packets*in + send.packets*out
	}
	if took > 0 && e.packets > 0 && packets > 0 {
		excess := expected*e.packets/e.all - float64(took)
		e.own = excess / packets
		keep := math.Exp(-float64(length) / float64(law.Long))
		e.excess, e.gaps = e.excess*keep+excess, e.gaps*keep+packets
	}
}

// gap charges what the kernel has counted in a time that no window has seen, in which the softirqs of
// packets took so long; 0: that was not measured.
func (e *estimate) gap(counts counts, length, took time.Duration) {
	for id := range counts {
		e.of(id)
	}
	e.measure(counts, length, took)
	var sum time.Duration
	for id, r := range e.recent {
		r.due.add(counts[id], length)
		sum += e.charge(r)
	}
	threads := scaled(sum, e.inThreads)
	e.thread += threads
	e.softirq += sum - threads
}

// charge adds the work that is due to the container's account, without the programs' own time for each
// packet, and returns its CPU time. Packets whose price no window has shown stay due.
func (e *estimate) charge(r *recent) time.Duration {
	before := r.ns()
	if before == 0 { // no window has seen it work
		if r.length > 0 {
			r.due.length = 0 // and without counters it has not
		}
		return 0
	}
	in, out := r.factors(r.due)
	r.due.length = 0
	if amounts(r.receive).ns > 0 {
		r.due.in = 0
	}
	if amounts(r.send).ns > 0 {
		r.due.out = 0
	}
	var more sums
	more.plus(r.sums, in, out, 0)
	more.lower(e.own)
	cpu := more.ns()
	more.plus(r.sums, 0, 0, cpu/before)
	r.extra.plus(more, 1, 1, 1)
	for victim, ns := range more.thefts {
		if victim.Kind == Task || victim.Kind == Peer {
			e.of(victim.Container).extra.robbed += ns
		}
	}
	return time.Duration(cpu)
}

// factors returns how much work there was for one that the windows saw, received and sent.
func (r *recent) factors(of counted) (in, out float64) {
	elapsed := of.length / max(r.length, 1)
	return factor(amounts(r.receive), r.in, of.in, elapsed), factor(amounts(r.send), r.out, of.out, elapsed)
}

// factor is how much work there was for one that the windows saw. n are its packets
// as the kernel counts them. If it counts much fewer than the programs, others bring the packets, and
// elapsed counts: the time for that of the windows.
func factor(seen amount, of ratio, n, elapsed float64) float64 {
	switch {
	case seen.ns == 0:
		return 0
	case of.seen > 0 && 2*of.counted >= of.seen && seen.packets > 0:
		return n * of.seen / of.counted / seen.packets
	}
	return elapsed
}

// forget ends the estimate of a container and returns its CPU time.
func (e *estimate) forget(id container.ID) (cpu time.Duration) {
	if r := e.recent[id]; r != nil {
		cpu = time.Duration(r.extra.ns())
	}
	delete(e.recent, id)
	was := func(victim Party, _ float64) bool { return victim.Container == id }
	for _, r := range e.recent {
		maps.DeleteFunc(r.thefts, was)
		maps.DeleteFunc(r.extra.thefts, was)
	}
	return cpu
}

// addTo adds the estimated work to a reading.
func (e *estimate) addTo(r *Reading) {
	r.Softirq += e.softirq
	r.Thread += e.thread
	for id, of := range e.recent {
		a, is := r.Accounts[id]
		if !is {
			continue
		}
		x := of.extra
		for p := range Protocols {
			a.Receive[p].plus(x.receive[p].work())
			a.Send[p].plus(x.send[p].work())
		}
		a.Own, a.Took, a.Robbed = a.Own+whole(x.own), a.Took+whole(x.took), a.Robbed+whole(x.robbed)
		r.Accounts[id] = a
		for cpu, ns := range x.byCPU {
			r.ByCPU[id][cpu] += whole(ns)
		}
		for victim, ns := range x.thefts {
			if d := whole(ns); d > 0 && r.Thefts != nil {
				r.Thefts[Pair{victim, id}] += d
			}
		}
	}
}

func whole(ns float64) time.Duration { return time.Duration(math.Round(ns)) }

func scaled(d time.Duration, f float64) time.Duration { return time.Duration(float64(d) * f) }

// works adds up the work of all protocols.
func works(of [Protocols]Work) (sum Work) {
	for _, w := range of {
		sum.plus(w)
	}
	return sum
}

func (a Account) packets() uint64 { return works(a.Receive).Packets + works(a.Send).Packets }

func (w *Work) plus(b Work) {
	w.CPU += b.CPU
	w.Packets += b.Packets
	w.Bytes += b.Bytes
}

// minus takes the numbers of an earlier reading of the same account away.
func (a *Account) minus(b Account) {
	for i := range Protocols {
		a.Receive[i].minus(b.Receive[i])
		a.Send[i].minus(b.Send[i])
	}
	a.Own, a.Took, a.Robbed = a.Own-b.Own, a.Took-b.Took, a.Robbed-b.Robbed
}

func (w *Work) minus(b Work) {
	w.CPU -= b.CPU
	w.Packets -= b.Packets
	w.Bytes -= b.Bytes
}

// Since returns what was counted since an earlier reading. An account, or a theft, of less than before is
// another one.
func (r Reading) Since(was Reading) Reading {
	r.Softirq -= was.Softirq
	r.Thread -= was.Thread
	r.Lost -= min(r.Lost, was.Lost)
	accounts := make(map[container.ID]Account, len(r.Accounts))
	for id, a := range r.Accounts {
		if before := was.Accounts[id]; before.CPU() <= a.CPU() && before.packets() <= a.packets() {
			a.minus(before)
		}
		accounts[id] = a
	}
	byCPU := make(map[container.ID][]time.Duration, len(r.ByCPU))
	for id, cpus := range r.ByCPU {
		grown := slices.Clone(cpus)
		for i, d := range was.ByCPU[id] {
			grown[i] -= d
		}
		byCPU[id] = grown
	}
	thefts := make(map[Pair]time.Duration, len(r.Thefts))
	for of, d := range r.Thefts {
		if before := was.Thefts[of]; before <= d {
			d -= before
		}
		if d > 0 {
			thefts[of] = d
		}
	}
	r.Accounts, r.ByCPU, r.Thefts = accounts, byCPU, thefts
	return r
}
