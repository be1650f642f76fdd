package account

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

// memory is the weight of a window relative to the next. The speed of a virtual machine differs more
// between windows than prices change, so several windows have to count.
const memory = 0.8

// anew is the factor by which a container's price has to change, in a window with at least few of its
// packets, to be a new price: earlier windows then no longer count.
const anew = 1.5

// count holds the packets that the kernel has counted at the devices of one container.
type count struct{ in, out uint64 } // to and from the container

func (c count) since(was count) count {
	if c.in < was.in || c.out < was.out {
		return count{} // a new device
	}
	return count{c.in - was.in, c.out - was.out}
}

// counts holds the counts of all containers with such devices.
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

// estimate adds up the work in gaps between windows, in which no program sees packets. The work is the
// price of a packet in the last windows, times the packets that the kernel has counted since. If the
// kernel counts none for a container (host network, macvlan, loopback, System), estimate assumes that
// the work of the windows continued. The programs' own time is part of the prices but not of a gap,
// so estimate lowers the prices to match the measured softirq time. The zero value is ready.
type estimate struct {
	recent          map[container.ID]*recent
	softirq, thread time.Duration
	inThreads       float64 // part of the work in NAPI threads, in the last window

	all, packets float64 // ns of work in the last windows, and its part in softirqs of packets
	own          float64 // ns of the programs in the price of a packet, from the last measured gap

	// In recent gaps: ns by which prices exceeded the measured time, and packets.
	excess, gaps float64
}

// programs returns the time in ns that the programs take for each packet that they see; 0: unknown. It
// is a mean over many gaps, because the machine's speed changes by more than that from second to
// second.
func (e *estimate) programs() float64 { return max(0, e.excess/max(e.gaps, 1)) }

// recent holds the work of one container in the last windows, and the charges for gaps. Older windows
// count less.
type recent struct {
	sums
	extra   sums // charges of all gaps
	in, out ratio
	length  float64 // length of the windows, in ns
	due     counted
}

// amount is Work with fractions. A window may count in part, and a gap may have less than one packet
// that adds up with those of other gaps.
type amount struct{ ns, packets, bytes float64 }

func (a *amount) plus(b amount, f float64) {
	a.ns, a.packets, a.bytes = a.ns+b.ns*f, a.packets+b.packets*f, a.bytes+b.bytes*f
}

func (a amount) work() Work {
	return Work{time.Duration(a.ns), uint64(math.Round(a.packets)), uint64(math.Round(a.bytes))}
}

// sums is an Account in amounts, with the container's other parts of a Reading.
type sums struct {
	receive, send     [Protocols]amount
	own, took, robbed float64
	byCPU             []float64
	thefts            map[Party]float64 // thefts by the container's packets, by victim
}

// sumsOf returns a container's work in a window, plus own ns for each packet that the programs took off.
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

// plus adds multiples of other sums: of what was received, of what was sent, and of the rest.
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

// lower takes each ns off for every packet. A gap may have other traffic or another machine speed than
// the windows, so the result stays between half and twice the work. It is whole, so that sums are exact.
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

// price returns the CPU time of a packet in ns.
func (s *sums) price() float64 { return s.ns() / max(s.packets(), 1) }

// ratio compares the packets that programs and kernel count in windows, which differ by GRO and GSO.
// The edges of windows disturb it, so it remembers longer than the price.
type ratio struct{ seen, counted float64 }

func (r *ratio) see(seen float64, counted uint64) {
	r.seen, r.counted = r.seen*memory+seen, r.counted*memory+float64(counted)
}

// counted holds the packets that the kernel has counted for a container in gaps, and their length.
type counted struct{ in, out, length float64 }

func (c *counted) add(n count, length time.Duration) {
	c.in += float64(n.in)
	c.out += float64(n.out)
	c.length += float64(length)
}

// window is the result of one window.
type window struct {
	seen   Reading // difference of two readings
	length time.Duration
	counts counts        // kernel's counts in the window
	whole  time.Duration // part of seen in softirqs of packets
	own    float64       // ns that the programs have taken off for each packet
}

// of returns the recent work of a container, new if there is none.
func (e *estimate) of(id container.ID) *recent {
	if e.recent == nil {
		e.recent = make(map[container.ID]*recent)
	}
	if e.recent[id] == nil {
		e.recent[id] = new(recent)
	}
	return e.recent[id]
}

// see adds a window to the estimate.
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

// part returns the factor for the work of a window, so that any window counts as much as the shortest.
// A phase of ten seconds may have seen other traffic, and predicts the next gap no better than a short
// window.
func (w window) part() float64 { return min(1, float64(shortest)/float64(max(w.length, 1))) }

// see adds the container's work in a window.
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

// measure sets own from the difference between the prices of a gap's packets and the time of softirqs
// with packets in that gap. own is the same for each packet, cheap or dear, because programs run for
// each. The parts of prices in threads and in interrupts before softirqs have no share in it.
func (e *estimate) measure(counts counts, length, took time.Duration) {
	var expected, packets float64
	for id, r := range e.recent {
		n := counts[id]
		if r.ns() == 0 && n.in+n.out >= few {
			return // packets without a known price took time
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

// gap charges the packets that the kernel has counted in a gap between windows. took is the time of
// softirqs with packets in the gap; 0: not measured.
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

// charge adds the due work to the container's account, without the programs' own time for each packet,
// and returns its CPU time. Packets stay due until a window has shown their price.
func (e *estimate) charge(r *recent) time.Duration {
	before := r.ns()
	if before == 0 { // no window has seen it work
		if r.length > 0 {
			r.due.length = 0 // a container without counters has not worked either
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

// factors returns the received and sent work as multiples of the work in the windows.
func (r *recent) factors(of counted) (in, out float64) {
	elapsed := of.length / max(r.length, 1)
	return factor(amounts(r.receive), r.in, of.in, elapsed), factor(amounts(r.send), r.out, of.out, elapsed)
}

// factor returns the work as a multiple of the work in the windows. n is the number of packets that the
// kernel has counted. If it counts far fewer than the programs, other devices bring the packets. factor
// then returns elapsed, the time as a multiple of the windows' length.
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

// minus subtracts an earlier reading of the same account.
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

// Since returns the growth since an earlier reading. An account or theft that has fallen is a new one,
// so all of it is growth.
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
