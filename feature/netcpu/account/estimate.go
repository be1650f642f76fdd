package account

import (
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// enough is the number of packets of one container in a window that makes earlier windows useless
// for the price of its packets. With fewer, earlier windows count too, each a tenth less than the next.
const (
	enough = 1000
	memory = 0.9
)

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

func (cs counts) sum() (n uint64) {
	for _, c := range cs {
		n += c.in + c.out
	}
	return n
}

// estimate adds up the work between windows, in which no program is attached: what the packets cost
// in the last windows, times the packets that the kernel has counted since. Where it counts none
// for a container (the host's network, macvlan, the loopback device, System), the work of the
// windows is taken to have gone on. Its zero value is ready.
type estimate struct {
	recent          map[container.ID]*recent
	extra           map[container.ID]*Account
	byCPU           map[container.ID][]time.Duration
	thefts          map[theftKey]time.Duration
	softirq, thread time.Duration
	inThreads       float64 // the part of the work that the last window saw in threads
}

type theftKey struct {
	victim  Party
	culprit container.ID
}

// recent is what the last windows have shown of one container. The older ones count less.
type recent struct {
	Account // with packets and bytes in parts
	byCPU   []time.Duration
	thefts  map[Party]time.Duration // of the container's packets, by victim
	in, out ratio
	length  float64 // of the windows, in ns
	due     counted
}

// ratio compares the packets of windows as the programs and as the kernel count them: GRO and GSO
// make them differ. The windows' edges disturb it, so it has a longer memory than the price.
type ratio struct{ seen, counted float64 }

func (r *ratio) see(seen, counted uint64) {
	r.seen, r.counted = r.seen*memory+float64(seen), r.counted*memory+float64(counted)
}

// counted is work that is not charged yet, as no window has shown its price.
type counted struct{ in, out, length float64 }

// window is what one window has shown.
type window struct {
	seen   Reading // the difference of two readings
	length time.Duration
	counts counts  // in the window
	own    float64 // ns of the programs themselves for each packet, which are not the packet's price
}

// of returns what is known of a container.
func (e *estimate) of(id container.ID) *recent {
	if e.recent == nil {
		e.recent, e.extra = make(map[container.ID]*recent), make(map[container.ID]*Account)
		e.byCPU, e.thefts = make(map[container.ID][]time.Duration), make(map[theftKey]time.Duration)
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
	if all := w.seen.Softirq + w.seen.Thread; all > 0 {
		e.inThreads = float64(w.seen.Thread) / float64(all)
	}
}

// see adds what a window shows of the container.
func (r *recent) see(seen Account, w window, thefts map[Party]time.Duration) {
	n, counted := w.counts[seen.Container]
	if seen.packets() == 0 && n == (count{}) && r.in.counted+r.out.counted > 0 {
		return // its price stays
	}
	net := seen.discount(w.own)
	keep := memory * max(0, 1-float64(seen.packets())/enough)
	r.scale(keep, keep, keep)
	// A phase of ten seconds is no better a sample of what comes next than a window is, and may have
	// seen other traffic: it counts as much as the shortest window.
	part := min(1, float64(shortest)/float64(max(w.length, 1)))
	inParts := seen
	inParts.recount(parts)
	inParts.scale(part, part, part)
	r.plus(inParts)
	for victim, d := range r.thefts {
		r.thefts[victim] = scaled(d, keep)
	}
	for victim, d := range thefts {
		r.thefts[victim] += scaled(d, net*part)
	}
	for i := range r.byCPU {
		r.byCPU[i] = scaled(r.byCPU[i], keep)
	}
	r.byCPU = plusEach(r.byCPU, w.seen.ByCPU[seen.Container], net*part)
	if counted {
		r.in.see(works(seen.Receive).Packets, n.in)
		r.out.see(works(seen.Send).Packets, n.out)
	}
	r.length = r.length*keep + float64(w.length)*part
}

// gap charges what the kernel has counted in a time in which no program was attached.
func (e *estimate) gap(counts counts, length time.Duration) {
	for id, c := range counts {
		r := e.of(id)
		r.due.in += float64(c.in)
		r.due.out += float64(c.out)
	}
	var sum time.Duration
	for _, r := range e.recent {
		r.due.length += float64(length)
		sum += e.charge(r)
	}
	threads := scaled(sum, e.inThreads)
	e.thread += threads
	e.softirq += sum - threads
}

// charge adds the work that is due to the container's account, and returns its CPU time.
func (e *estimate) charge(r *recent) time.Duration {
	before := r.CPU()
	if before == 0 { // no window has seen it work
		if r.length > 0 {
			r.due.length = 0 // and without counters it has not
		}
		return 0
	}
	elapsed := r.due.length / max(r.length, 1)
	in := factor(works(r.Receive), r.in, &r.due.in, elapsed)
	out := factor(works(r.Send), r.out, &r.due.out, elapsed)
	r.due.length = 0
	more := r.Account
	more.scale(in, out, 0)
	more.recount(1.0 / parts)
	cpu := more.CPU()
	all := float64(cpu) / float64(before)
	more.Own, more.Took = scaled(r.Own, all), scaled(r.Took, all)
	e.account(r.Container).plus(more)
	for victim, d := range r.thefts {
		d = scaled(d, all)
		e.thefts[theftKey{victim, r.Container}] += d
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

// factor is how much work there was in the gap for one that the windows saw (seen, in parts). due
// are the packets of the gap as the kernel counts them. If it counts much fewer than the programs,
// others bring the packets, and elapsed counts: the time of the gap for that of the windows. Packets
// whose price no window has shown stay due.
func factor(seen Work, of ratio, due *float64, elapsed float64) (f float64) {
	switch {
	case seen.CPU == 0:
		return 0
	case of.seen > 0 && 2*of.counted >= of.seen && seen.Packets > 0:
		f = *due * of.seen / of.counted / (float64(seen.Packets) / parts)
	default:
		f = elapsed
	}
	*due = 0
	return f
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
		if k.culprit == id || k.victim.Container == id {
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
	seen := make(map[theftKey]bool, len(r.Thefts))
	for i := range r.Thefts {
		t := &r.Thefts[i]
		k := theftKey{t.Victim, t.Culprit}
		seen[k] = true
		t.CPU += e.thefts[k]
	}
	for k, d := range e.thefts {
		if !seen[k] && d > 0 {
			r.Thefts = append(r.Thefts, Theft{Victim: k.victim, Culprit: k.culprit, CPU: d})
		}
	}
}

func scaled(d time.Duration, f float64) time.Duration { return time.Duration(float64(d) * f) }

// works adds up the work of all protocols.
func works(of [Protocols]Work) (sum Work) {
	for _, w := range of {
		sum.CPU += w.CPU
		sum.Packets += w.Packets
		sum.Bytes += w.Bytes
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
	w.Packets = uint64(float64(w.Packets) * f)
	w.Bytes = uint64(float64(w.Bytes) * f)
}

// discount takes the time of the programs away, so many ns for each packet, and returns which part
// of the time is left.
func (a *Account) discount(own float64) (net float64) {
	const most = 0.7 // of a packet's time
	before := a.CPU()
	if before == 0 {
		return 1
	}
	for i := range Protocols {
		for _, w := range []*Work{&a.Receive[i], &a.Send[i]} {
			w.CPU -= min(scaled(w.CPU, most), time.Duration(own*float64(w.Packets)))
		}
	}
	net = float64(a.CPU()) / float64(before)
	a.Own, a.Took = scaled(a.Own, net), scaled(a.Took, net)
	return net
}

// plus adds the numbers of another account.
func (a *Account) plus(b Account) {
	for i := range Protocols {
		a.Receive[i].plus(b.Receive[i])
		a.Send[i].plus(b.Send[i])
	}
	a.Own, a.Took, a.Robbed = a.Own+b.Own, a.Took+b.Took, a.Robbed+b.Robbed
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
	before := make(map[theftKey]time.Duration, len(was.Thefts))
	for _, t := range was.Thefts {
		before[theftKey{t.Victim, t.Culprit}] = t.CPU
	}
	thefts := make([]Theft, 0, len(r.Thefts))
	for _, t := range r.Thefts {
		if t.CPU -= before[theftKey{t.Victim, t.Culprit}]; t.CPU > 0 {
			thefts = append(thefts, t)
		}
	}
	r.Accounts, r.ByCPU, r.Thefts = list, byCPU, thefts
	return r
}
