package account

import (
	"maps"
	"math"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// memory is how much each window counts relative to the next. The speed of a virtual machine differs
// from window to window by more than prices change, so that several have to count.
const memory = 0.8

// A price that differs by a factor of anew from what was known, in a window with at least few packets
// of that container, is another one: earlier windows count no more.
const anew = 1.5

// parts is what packets and bytes of recent are counted in: of one packet in each window whole numbers
// would remember that one only, with the time of ten.
const parts = 1024

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
	extra           map[container.ID]*Account
	byCPU           map[container.ID][]time.Duration
	thefts          map[Pair]time.Duration
	softirq, thread time.Duration
	inThreads       float64 // the part of the work that the last window saw in threads

	all, packets float64 // ns of the last windows, and of that in softirqs of packets
	own          float64 // ns of the programs in the price of each packet, in the last gap that was measured
}

// recent is what the last windows have shown of one container. The older ones count less.
type recent struct {
	Account // with packets and bytes in parts
	byCPU   []time.Duration
	thefts  map[Party]time.Duration // of the container's packets, by victim
	in, out ratio
	length  float64 // of the windows, in ns
	due     counted
	rest    [2 * Protocols]rest
}

// rest is what rounding to whole packets and bytes has left of one protocol's work, in parts: a gap
// may have less than one packet, and many gaps some.
type rest struct{ packets, bytes int64 }

// round makes the packets and bytes of parts whole. The rest is for the next gap.
func (r *rest) round(w *Work) {
	whole := func(n uint64, rest *int64) uint64 {
		*rest += int64(n)
		all := (*rest + parts/2) / parts
		*rest -= all * parts
		return uint64(all)
	}
	w.Packets, w.Bytes = whole(w.Packets, &r.packets), whole(w.Bytes, &r.bytes)
}

// ratio compares the packets of windows as the programs and as the kernel count them: GRO and GSO
// make them differ. The windows' edges disturb it, so it has a longer memory than the price.
type ratio struct{ seen, counted float64 }

func (r *ratio) see(seen, counted uint64) {
	r.seen, r.counted = r.seen*memory+float64(seen), r.counted*memory+float64(counted)
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
}

// of returns what is known of a container.
func (e *estimate) of(id container.ID) *recent {
	if e.recent == nil {
		e.recent, e.extra = make(map[container.ID]*recent), make(map[container.ID]*Account)
		e.byCPU, e.thefts = make(map[container.ID][]time.Duration), make(map[Pair]time.Duration)
	}
	r := e.recent[id]
	if r == nil {
		r = &recent{Account: Account{Container: id}, thefts: make(map[Party]time.Duration)}
		e.recent[id] = r
	}
	return r
}

// see takes up a window.
func (e *estimate) see(w window) {
	thefts := make(map[container.ID]map[Party]time.Duration)
	for _, t := range w.seen.Thefts {
		if thefts[t.Culprit] == nil {
			thefts[t.Culprit] = make(map[Party]time.Duration)
		}
		thefts[t.Culprit][t.Victim] += t.CPU
	}
	for _, seen := range w.seen.Accounts {
		e.of(seen.Container).see(seen, w, thefts[seen.Container])
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
func (r *recent) see(seen Account, w window, thefts map[Party]time.Duration) {
	n, counted := w.counts[seen.Container]
	if seen.packets() == 0 && n == (count{}) && r.in.counted+r.out.counted > 0 {
		return // its price stays
	}
	keep := memory
	if was, now := r.price(parts), seen.price(1); seen.packets() >= few && (now > was*anew || now < was/anew) {
		keep = 0
	}
	r.scale(keep, keep, keep)
	part := w.part()
	inParts := seen
	inParts.recount(parts)
	inParts.scale(part, part, part)
	r.plus(inParts)
	for victim, d := range r.thefts {
		r.thefts[victim] = scaled(d, keep)
	}
	for victim, d := range thefts {
		r.thefts[victim] += scaled(d, part)
	}
	for i := range r.byCPU {
		r.byCPU[i] = scaled(r.byCPU[i], keep)
	}
	r.byCPU = plusEach(r.byCPU, w.seen.ByCPU[seen.Container], part)
	if counted {
		r.in.see(works(seen.Receive).Packets, n.in)
		r.out.see(works(seen.Send).Packets, n.out)
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
		if r.CPU() == 0 && n.in+n.out >= few {
			return // somebody's packets took time, and their price is not known
		}
		in, out := r.factors(counted{float64(n.in), float64(n.out), float64(length)})
		receive, send := works(r.Receive), works(r.Send)
		expected += float64(receive.CPU)*in + float64(send.CPU)*out
		packets += (float64(receive.Packets)*in + float64(send.Packets)*out) / parts
	}
	if took > 0 && e.packets > 0 && packets > 0 {
		e.own = (expected*e.packets/e.all - float64(took)) / packets
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
	before := r.CPU()
	if before == 0 { // no window has seen it work
		if r.length > 0 {
			r.due.length = 0 // and without counters it has not
		}
		return 0
	}
	in, out := r.factors(r.due)
	r.due.length = 0
	if works(r.Receive).CPU > 0 {
		r.due.in = 0
	}
	if works(r.Send).CPU > 0 {
		r.due.out = 0
	}
	more := r.Account
	more.scale(in, out, 0)
	for i := range Protocols {
		more.Receive[i].lower(e.own / parts)
		more.Send[i].lower(e.own / parts)
		r.rest[i].round(&more.Receive[i])
		r.rest[Protocols+i].round(&more.Send[i])
	}
	cpu := more.CPU()
	all := float64(cpu) / float64(before)
	more.Own, more.Took = scaled(r.Own, all), scaled(r.Took, all)
	e.account(r.Container).plus(more)
	for victim, d := range r.thefts {
		d = scaled(d, all)
		e.thefts[Pair{victim, r.Container}] += d
		if victim.Kind == Task || victim.Kind == Peer {
			e.account(victim.Container).Robbed += d
		}
	}
	e.byCPU[r.Container] = plusEach(e.byCPU[r.Container], r.byCPU, all)
	return cpu
}

func (e *estimate) account(id container.ID) *Account {
	a := e.extra[id]
	if a == nil {
		a = &Account{Container: id}
		e.extra[id] = a
	}
	return a
}

// plusEach adds the elements of b, times f, to those of a.
func plusEach(a, b []time.Duration, f float64) []time.Duration {
	if len(a) < len(b) {
		a = append(a, make([]time.Duration, len(b)-len(a))...)
	}
	for i, d := range b {
		a[i] += scaled(d, f)
	}
	return a
}

// factors returns how much work there was for one that the windows saw, received and sent.
func (r *recent) factors(of counted) (in, out float64) {
	elapsed := of.length / max(r.length, 1)
	return factor(works(r.Receive), r.in, of.in, elapsed), factor(works(r.Send), r.out, of.out, elapsed)
}

// factor is how much work there was for one that the windows saw (seen, in parts). n are its packets
// as the kernel counts them. If it counts much fewer than the programs, others bring the packets, and
// elapsed counts: the time for that of the windows.
func factor(seen Work, of ratio, n, elapsed float64) float64 {
	switch {
	case seen.CPU == 0:
		return 0
	case of.seen > 0 && 2*of.counted >= of.seen && seen.Packets > 0:
		return n * of.seen / of.counted / (float64(seen.Packets) / parts)
	}
	return elapsed
}

// forget ends the estimate of a container and returns its CPU time.
func (e *estimate) forget(id container.ID) (cpu time.Duration) {
	if a := e.extra[id]; a != nil {
		cpu = a.CPU()
	}
	delete(e.recent, id)
	delete(e.extra, id)
	delete(e.byCPU, id)
	for k := range e.thefts {
		if k.Culprit == id || k.Victim.Container == id {
			delete(e.thefts, k)
		}
	}
	for _, r := range e.recent {
		for victim := range r.thefts {
			if victim.Container == id {
				delete(r.thefts, victim)
			}
		}
	}
	return cpu
}

// addTo adds the estimated work to a reading.
func (e *estimate) addTo(r *Reading, thefts bool) {
	r.Softirq += e.softirq
	r.Thread += e.thread
	for i := range r.Accounts {
		a := &r.Accounts[i]
		if x := e.extra[a.Container]; x != nil {
			a.plus(*x)
		}
		cpus := r.ByCPU[a.Container]
		for i, d := range e.byCPU[a.Container] {
			if i < len(cpus) {
				cpus[i] += d
			}
		}
	}
	if !thefts {
		return
	}
	left := maps.Clone(e.thefts)
	for i := range r.Thefts {
		t := &r.Thefts[i]
		k := Pair{t.Victim, t.Culprit}
		t.CPU += left[k]
		delete(left, k)
	}
	for k, d := range left {
		if d > 0 {
			r.Thefts = append(r.Thefts, Theft{Victim: k.Victim, Culprit: k.Culprit, CPU: d})
		}
	}
}

func scaled(d time.Duration, f float64) time.Duration { return time.Duration(float64(d) * f) }

// works adds up the work of all protocols.
func works(of [Protocols]Work) (sum Work) {
	for _, w := range of {
		sum.plus(w)
	}
	return sum
}

func (a Account) packets() uint64 { return works(a.Receive).Packets + works(a.Send).Packets }

// scale multiplies the numbers of an account: Receive, Send and the rest.
func (a *Account) scale(receive, send, rest float64) {
	for i := range Protocols {
		a.Receive[i].scale(receive)
		a.Send[i].scale(send)
	}
	a.Own, a.Took, a.Robbed = scaled(a.Own, rest), scaled(a.Took, rest), scaled(a.Robbed, rest)
}

// recount multiplies the packets and bytes.
func (a *Account) recount(f float64) {
	for i := range Protocols {
		a.Receive[i].recount(f)
		a.Send[i].recount(f)
	}
}

func (w *Work) scale(f float64) {
	w.CPU = scaled(w.CPU, f)
	w.recount(f)
}

func (w *Work) recount(f float64) {
	w.Packets = uint64(math.Round(float64(w.Packets) * f))
	w.Bytes = uint64(math.Round(float64(w.Bytes) * f))
}

// price is the CPU time of a packet, which counts as so many.
func (a Account) price(count float64) float64 {
	return float64(a.CPU()) * count / float64(max(a.packets(), 1))
}

// plus adds the numbers of another account.
func (a *Account) plus(b Account) {
	for i := range Protocols {
		a.Receive[i].plus(b.Receive[i])
		a.Send[i].plus(b.Send[i])
	}
	a.Own, a.Took, a.Robbed = a.Own+b.Own, a.Took+b.Took, a.Robbed+b.Robbed
}

// lower takes a time in ns off for each packet. The gap may have had other traffic than the windows, and
// a machine of another speed: some of the work stays.
func (w *Work) lower(each float64) {
	const least, most = 0.3, 2
	cpu := float64(w.CPU)
	w.CPU = time.Duration(min(max(cpu-each*float64(w.Packets), least*cpu), most*cpu))
}

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

// after returns what was counted since an earlier reading, without estimates.
func (r Reading) after(was Reading) Reading {
	r.Softirq -= was.Softirq
	r.Thread -= was.Thread
	accounts := make(map[container.ID]Account, len(was.Accounts))
	for _, a := range was.Accounts {
		accounts[a.Container] = a
	}
	list := make([]Account, 0, len(r.Accounts))
	for _, a := range r.Accounts {
		if before := accounts[a.Container]; before.CPU() <= a.CPU() && before.packets() <= a.packets() {
			a.minus(before) // else it is another account of the same container
		}
		list = append(list, a)
	}
	byCPU := make(map[container.ID][]time.Duration, len(r.ByCPU))
	for id, cpus := range r.ByCPU {
		grown := make([]time.Duration, len(cpus))
		for i, d := range cpus {
			if grown[i] = d; i < len(was.ByCPU[id]) {
				grown[i] -= was.ByCPU[id][i]
			}
		}
		byCPU[id] = grown
	}
	before := make(map[Pair]time.Duration, len(was.Thefts))
	for _, t := range was.Thefts {
		before[Pair{t.Victim, t.Culprit}] = t.CPU
	}
	thefts := make([]Theft, 0, len(r.Thefts))
	for _, t := range r.Thefts {
		if t.CPU -= before[Pair{t.Victim, t.Culprit}]; t.CPU > 0 {
			thefts = append(thefts, t)
		}
	}
	r.Accounts, r.ByCPU, r.Thefts = list, byCPU, thefts
	return r
}
