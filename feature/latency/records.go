package latency

import (
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

const (
	maxRecords = 4096                  // kept of one tenant
	lease      = 10 * time.Second      // packets are recorded for so long after the last request
	patience   = 20 * time.Millisecond // in which a packet comes from the device to its socket
	readIn     = time.Second           // in which its application begins to read it: later is not told
)

// Record is one packet of a container.
type Record struct {
	At        time.Time // when it left by the uplink, or came to the device or the socket
	Direction Direction
	Protocol  uint8 // IPPROTO_
	From, To  netip.AddrPort
	Seq       uint32 // of TCP; of an ICMP echo
	Type      uint8  // of ICMP
	Syn       bool   // of TCP: it opens a connection, or answers that
	Bytes     int    // of the IP packet
	// Stages has the time of each; less than 0 is not known.
	Stages [stages]time.Duration
	// Mace is the span of the MACE paper, between the application and the uplink: from the
	// call that sends, or to the copy that begins to read. Less than 0 is not known.
	Mace time.Duration

	id     uint64
	number uint64
	waits  []wait
}

// tracer keeps the records of those tenants that somebody asks for.
type tracer struct {
	reader *ringbuf.Reader
	done   chan struct{}
	turn   *feature.Loop
	zero   time.Time // see clock; one for all, as times of records are subtracted

	mu      sync.Mutex
	traces  map[identity.Slot]*trace
	waiting map[uint64]waiting // for what the socket and its reader say, by id
	waits   map[uint64][]wait  // of packets whose record comes next, by id
	astray  uint64             // waits whose record did not come
}

type waiting struct {
	Record
	slot  identity.Slot
	until time.Time
}

// trace are the latest records of one tenant, of those packets that somebody wants.
type trace struct {
	records []Record
	first   uint64                          // number of the first record, which may have been overwritten
	next    uint64                          // number of the next record
	wanted  map[api.LatencyFilter]time.Time // until when; without After and Most
	keep    time.Time                       // until when records are kept, also if no more are wanted
	news    chan struct{}                   // closed when there is one
}

func newTracer(m *meter, turn *feature.Loop) (*tracer, error) {
	r, err := ringbuf.NewReader(m.maps.Records)
	if err != nil {
		return nil, fmt.Errorf("read records: %w", err)
	}
	t := newTraces()
	t.reader, t.turn, t.done, t.zero = r, turn, make(chan struct{}), clock()
	go t.run()
	return t, nil
}

// newTraces is a tracer that nothing comes to but by take.
func newTraces() *tracer {
	return &tracer{traces: make(map[identity.Slot]*trace), waiting: make(map[uint64]waiting), waits: make(map[uint64][]wait)}
}

func (t *tracer) close() error {
	if t == nil {
		return nil
	}
	err := t.reader.Close()
	<-t.done
	return err
}

// mostTaken is how many records and waits are read in one time of patience: 50,000 in a
// second. Beyond, they wait in the kernel's buffer, which loses what it has no room for.
const mostTaken = 1000

func (t *tracer) run() {
	defer close(t.done)
	turn, taken := time.Now(), 0
	for {
		if now := time.Now(); now.Sub(turn) >= patience {
			turn, taken = now, 0
		} else if taken == mostTaken {
			time.Sleep(patience - now.Sub(turn))
		}
		taken++
		t.reader.SetDeadline(time.Now().Add(patience)) // nobody wakes it
		raw, err := t.reader.Read()
		if errors.Is(err, ringbuf.ErrClosed) {
			return
		}
		t.turn.Begin()
		if err == nil {
			t.take(raw.RawSample)
		}
		if err != nil || raw.Remaining == 0 { // else what is waited for may be there already
			t.flush(time.Now())
		}
		t.turn.End()
	}
}

// take adds one record as the kernel gave it.
func (t *tracer) take(raw []byte) {
	if isWait(raw) {
		t.takeWait(raw)
		return
	}
	r, s, kind, next, err := parseRecord(raw, t.zero)
	if err != nil {
		return // not of our programs
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if kind == kindRecord {
		r.waits = t.waits[r.id]
		delete(t.waits, r.id)
	}
	if kind != kindRecord {
		w, known := t.waiting[r.id]
		if !known {
			return // it was given up
		}
		delete(t.waiting, r.id)
		if kind == kindAtSocket {
			w.At = r.At // Stack ends there
			w.Stages[Socket], w.Stages[Stack] = r.Stages[Socket], r.Stages[Stack]
		} else {
			w.Mace = r.Mace
		}
		r, s = w.Record, w.slot
	}
	switch {
	case next == awaitsNothing || len(t.waiting) == maxRecords:
		t.add(s, r)
	case next == awaitsSocket:
		t.waiting[r.id] = waiting{r, s, time.Now().Add(patience)}
	default:
		t.waiting[r.id] = waiting{r, s, time.Now().Add(readIn)}
	}
}

// maxAstray is how many packets may have waits whose record has not come. The kernel tells
// both one after the other, and only those of other CPUs are between: beyond that the
// records were lost.
const maxAstray = 1024

// takeWait keeps what a CPU did while a packet waited, for that packet's record.
func (t *tracer) takeWait(raw []byte) {
	id, w, err := parseWait(raw)
	if err != nil {
		return // not of our programs
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.waits) == maxAstray {
		t.astray += maxAstray
		clear(t.waits)
	}
	if len(t.waits[id]) < int(stages) {
		t.waits[id] = append(t.waits[id], w)
	}
}

// flush gives up waiting for sockets and readers that do not come.
func (t *tracer) flush(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, w := range t.waiting {
		if now.After(w.until) {
			delete(t.waiting, id)
			t.add(w.slot, w.Record)
		}
	}
}

func (t *tracer) add(s identity.Slot, r Record) {
	tr := t.traces[s]
	if tr == nil || !tr.wants(&r) {
		return // nobody asks for it
	}
	r.number = tr.next
	tr.next++
	if len(tr.records) == maxRecords {
		copy(tr.records, tr.records[maxRecords/4:])
		tr.records = tr.records[:maxRecords-maxRecords/4]
	}
	tr.records = append(tr.records, r)
	close(tr.news)
	tr.news = make(chan struct{})
}

// maxFilters is how many filters of one tenant are told apart: beyond, all packets are
// kept, and who asks chooses of them.
const maxFilters = 8

// want begins to keep what a filter wants of a tenant's records, or goes on with it, for
// a time from now on. numbered is the number behind the last record of its last recording,
// 0 if there was none: who followed that is to see that it has ended.
func (t *tracer) want(s identity.Slot, numbered uint64, f api.LatencyFilter, now time.Time, during time.Duration) *trace {
	t.mu.Lock()
	defer t.mu.Unlock()
	tr := t.traces[s]
	if tr == nil {
		tr = &trace{news: make(chan struct{}), first: numbered + 1, next: numbered + 1, wanted: make(map[api.LatencyFilter]time.Time)}
		t.traces[s] = tr
	}
	tr.lapsed(now)
	f.After, f.Most = 0, 0
	if _, known := tr.wanted[f]; !known && len(tr.wanted) >= maxFilters {
		f = api.LatencyFilter{}
	}
	if until := now.Add(during); until.After(tr.wanted[f]) {
		tr.wanted[f] = until
		if until.After(tr.keep) {
			tr.keep = until
		}
	}
	return tr
}

// unwant ends what was wanted for longer than a lease: that was switched on. What has
// been recorded stays.
func (t *tracer) unwant(s identity.Slot, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tr := t.traces[s]
	if tr == nil {
		return
	}
	if all := (api.LatencyFilter{}); tr.wanted[all].After(now.Add(lease)) {
		delete(tr.wanted, all)
	}
}

// lapsed forgets filters that nobody has asked with lately, and says whether none is
// left.
func (tr *trace) lapsed(now time.Time) bool {
	maps.DeleteFunc(tr.wanted, func(_ api.LatencyFilter, until time.Time) bool { return now.After(until) })
	return len(tr.wanted) == 0
}

// forget drops all records of a tenant.
func (t *tracer) forget(s identity.Slot) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.traces, s)
	maps.DeleteFunc(t.waiting, func(_ uint64, w waiting) bool { return w.slot == s })
}

func (tr *trace) wants(r *Record) bool {
	for f := range tr.wanted {
		if wants(f, r) {
			return true
		}
	}
	return false
}

// wants says whether a record is of those that a filter wants.
func wants(f api.LatencyFilter, r *Record) bool {
	switch {
	case f.Protocol != "" && f.Protocol != class(r.Protocol).String(),
		f.Port != 0 && f.Port != r.From.Port() && f.Port != r.To.Port(),
		f.Peer.IsValid() && !f.Peer.Contains(r.From.Addr()) && !f.Peer.Contains(r.To.Addr()),
		f.Sample > 1 && r.flow()%uint64(f.Sample) != 0:
		return false
	}
	return true
}

// flow is a number that all packets of a flow have in common, both ways. It does not
// change with the agent: two of them sample the same flows.
func (r *Record) flow() uint64 {
	a, b := r.From, r.To
	if b.Compare(a) < 0 {
		a, b = b, a
	}
	h := fnv.New64a()
	for _, end := range []netip.AddrPort{a, b} {
		addr := end.Addr().As16()
		h.Write(addr[:])
		h.Write([]byte{byte(end.Port() >> 8), byte(end.Port())})
	}
	h.Write([]byte{r.Protocol})
	sum := h.Sum64()
	return sum ^ sum>>32 // the low bits of FNV alone are weak
}

// lapsed has the tenants of whose packets none is wanted any more, each with the number
// behind its last record, and says how many traces there still are: records are kept for
// longer where that was switched on.
func (t *tracer) lapsed(now time.Time) (slots map[identity.Slot]uint64, left int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	slots = make(map[identity.Slot]uint64)
	for s, tr := range t.traces {
		if !tr.lapsed(now) {
			continue
		}
		slots[s] = tr.next
		if now.After(tr.keep) {
			delete(t.traces, s)
		}
	}
	return slots, len(t.traces)
}

// after gives records from a number on, so many at the most, the number of the one
// behind them, how many before them are missed, and a channel that is closed at the next.
// 0 and 1 are the first of this recording, the greatest number is what comes next. Another
// one that this recording has not given is of an earlier one, which has ended: at least one
// record is missed then.
func (t *tracer) after(tr *trace, number uint64, most int) (list []Record, next, missed uint64, news <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case number <= 1:
		number = tr.first
	case number == math.MaxUint64:
		number = tr.next
	case number < tr.first || number > tr.next:
		number, missed = tr.first, 1
	}
	oldest := tr.next - uint64(len(tr.records))
	if number < oldest {
		number, missed = oldest, missed+oldest-number
	}
	from := number - oldest
	list = slices.Clone(tr.records[from:min(from+uint64(most), uint64(len(tr.records)))])
	return list, number + uint64(len(list)), missed, tr.news
}

// lostWaits is how many waits came without a record.
func (t *tracer) lostWaits() uint64 {
	if t == nil {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.astray
}

// clock is the wall clock's time when the monotonic one was at 0: the best of some
// readings, as whoever reads may lose its CPU between the two.
func clock() (zero time.Time) {
	best := time.Hour
	for range 20 {
		var ts unix.Timespec
		began := time.Now()
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
			return began // there is always one
		}
		if took := time.Since(began); took < best {
			best, zero = took, began.Add(took/2-time.Duration(ts.Nano()))
		}
	}
	return zero
}
