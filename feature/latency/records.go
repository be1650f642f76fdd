package latency

import (
	"encoding/binary"
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
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

const (
	maxRecords = 4096                  // kept for one tenant
	lease      = 10 * time.Second      // how long packets are recorded after a request
	patience   = 20 * time.Millisecond // longest wait between device and socket
)

// Record is one packet of a container.
type Record struct {
	At        time.Time // when it left by the uplink, or reached the device or the socket
	Direction Direction
	Protocol  uint8 // IPPROTO_
	From, To  netip.AddrPort
	Seq       uint32 // of TCP; of an ICMP echo
	Type      uint8  // of ICMP
	Syn       bool   // of TCP: SYN or SYN-ACK
	Bytes     int    // of the IP packet
	// Stages holds the time of each stage; less than 0: unknown.
	Stages [stages]time.Duration

	id     uint64
	number uint64
	waits  []wait
}

// tracer reads and keeps the records of tenants with requests.
type tracer struct {
	reader *ringbuf.Reader
	done   chan struct{}
	turn   *feature.Loop
	zero   time.Time // see bpf.Zero; the same for all records, because their times are subtracted

	mu      sync.Mutex
	traces  map[identity.Slot]*trace
	waiting map[uint64]waiting // for the socket's record, by id
	waits   map[uint64][]wait  // for the packet's record, by id
	orphans uint64             // waits without a record
}

type waiting struct {
	Record
	slot  identity.Slot
	until time.Time
}

// trace holds the latest records of one tenant that match a filter.
type trace struct {
	records []Record
	first   uint64                          // number of the first record, which may be overwritten
	next    uint64                          // number of the next record
	wanted  map[api.LatencyFilter]time.Time // end of each filter's wish; filters without After and Most
	keep    time.Time                       // how long records are kept, even if no filter is left
	news    chan struct{}                   // closed by the next record
}

func newTracer(m *meter, turn *feature.Loop) (*tracer, error) {
	r, err := ringbuf.NewReader(m.maps.Records)
	if err != nil {
		return nil, fmt.Errorf("read records: %w", err)
	}
	t := newTraces()
	t.reader, t.turn, t.done, t.zero = r, turn, make(chan struct{}), bpf.Zero()
	go t.run()
	return t, nil
}

// newTraces makes a tracer without a reader.
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

// mostTaken limits the records and waits that are read per patience: 50,000 per second. The rest stays
// in the kernel's buffer, which drops what does not fit.
const mostTaken = 1000

func (t *tracer) run() {
	defer close(t.done)
	var raw ringbuf.Record
	var err error
	read := func() {
		t.turn.Begin()
		defer t.turn.End()
		if err == nil {
			t.take(raw.RawSample)
		}
		if err != nil || raw.Remaining == 0 { // otherwise an awaited record may be next
			t.flush(time.Now())
		}
	}
	turn, taken := time.Now(), 0
	for {
		if now := time.Now(); now.Sub(turn) >= patience {
			turn, taken = now, 0
		} else if taken == mostTaken {
			time.Sleep(patience - now.Sub(turn))
		}
		taken++
		t.reader.SetDeadline(time.Now().Add(patience)) // the programs do not wake it
		raw, err = t.reader.Read()
		if errors.Is(err, ringbuf.ErrClosed) {
			return
		}
		t.turn.Turn(read)
	}
}

// take adds one sample of the kernel: a record, or a wait.
func (t *tracer) take(raw []byte) {
	if len(raw)%waitedPart == waitedHead%waitedPart { // a struct record has another length
		t.takeWait(raw)
		return
	}
	r, s, kind, awaits, err := parseRecord(raw, t.zero)
	if err != nil {
		return // not from our programs
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if kind == kindRecord {
		r.waits = t.waits[r.id]
		delete(t.waits, r.id)
	} else {
		w, known := t.waiting[r.id]
		if !known {
			return // the packet's record was flushed
		}
		delete(t.waiting, r.id)
		w.At = r.At // Stack ends there
		w.Stages[Socket], w.Stages[Stack] = r.Stages[Socket], r.Stages[Stack]
		r, s = w.Record, w.slot
	}
	if !awaits || len(t.waiting) == maxRecords {
		t.add(s, r)
		return
	}
	t.waiting[r.id] = waiting{r, s, time.Now().Add(patience)}
}

// maxOrphans limits the packets with a wait but without a record. The kernel emits a wait right before
// its record, so only samples of other CPUs come in between. Beyond the limit the records are lost.
const maxOrphans = 1024

// takeWait keeps a wait for the packet's record.
func (t *tracer) takeWait(raw []byte) {
	id, w, err := parseWait(raw)
	if err != nil {
		return // not from our programs
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.waits) == maxOrphans {
		t.orphans += maxOrphans
		clear(t.waits)
	}
	if len(t.waits[id]) < int(stages) {
		t.waits[id] = append(t.waits[id], w)
	}
}

// flush adds records that have waited too long for their socket's record.
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
		return // no filter wants it
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

// maxFilters limits the filters of one tenant. Beyond it all packets are recorded, and a request
// selects among them.
const maxFilters = 8

// want keeps the records of a tenant that match a filter, for a time from now. numbered is the number
// after the last record of the tenant's previous recording, 0 if there was none. Numbers continue from
// it, so that a reader notices the end of that recording.
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

// unwant ends a recording that was switched on, which lasts longer than a lease. Its records stay.
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

// lapsed removes filters that have expired, and reports whether none is left.
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

// wants reports whether a filter wants a record.
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

// flow returns a hash of the flow, equal in both directions. It is the same in all agents, so that all
// sample the same flows.
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

// lapsed returns the tenants without a filter, each with the number after its last record. left is
// the number of remaining traces, which includes switched-on recordings that are over.
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

// after returns at most most records from a number on, the number after them, the number of missed
// records before them, and a channel that the next record closes. The numbers 0 and 1 stand for the
// first record of this recording, math.MaxUint64 for the next one. Any other number outside this
// recording is from an earlier one, which has ended; after counts that as one missed record.
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

// lostWaits returns the number of waits without a record.
func (t *tracer) lostWaits() uint64 {
	if t == nil {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.orphans
}

// Kinds of records: RECORD and AT_SOCKET in maps.bpf.h.
const (
	kindRecord = iota
	kindAtSocket
)

// Offsets in struct record, and its length. It is parsed field by field because reflection is too
// slow for each packet.
const (
	recordStage = 16
	recordFlow  = 80
	recordSize  = 144
)

// parseRecord parses a struct record. at is the wall time at which the monotonic clock was 0.
func parseRecord(raw []byte, at time.Time) (r Record, s identity.Slot, kind uint8, awaits bool, err error) {
	if len(raw) != recordSize {
		return r, 0, 0, false, fmt.Errorf("record of %d bytes", len(raw))
	}
	host := binary.NativeEndian
	flow, stage := raw[recordFlow:], raw[recordStage:]
	slot, direction, kind, awaits := host.Uint32(raw[132:]), raw[136], raw[137], raw[138] != 0
	if direction >= uint8(directions) {
		return r, 0, 0, false, fmt.Errorf("record of direction %d", direction)
	}
	seq := host.Uint32(flow[36:])
	r = Record{
		At: at.Add(time.Duration(host.Uint64(raw))), Direction: Direction(direction), Protocol: flow[41],
		Seq: seq, Syn: flow[48]&2 != 0, Bytes: int(host.Uint32(flow[44:])), id: host.Uint64(raw[8:]),
	}
	from, to := binary.BigEndian.Uint16(flow[32:]), binary.BigEndian.Uint16(flow[34:])
	if r.Protocol == unix.IPPROTO_ICMP || r.Protocol == unix.IPPROTO_ICMPV6 {
		r.Type, r.Seq, from, to = uint8(seq>>8), uint32(to), 0, 0
	}
	address := func(b []byte) netip.Addr {
		if flow[40] == 4 {
			return netip.AddrFrom4([4]byte(b))
		}
		return netip.AddrFrom16([16]byte(b))
	}
	r.From, r.To = netip.AddrPortFrom(address(flow), from), netip.AddrPortFrom(address(flow[16:]), to)
	for i := range r.Stages {
		r.Stages[i] = time.Duration(host.Uint64(stage[8*i:])) // NONE is -1
	}
	return r, identity.Slot(slot), kind, awaits, nil
}

// Lengths in struct waited: of its head, and of each part.
const (
	waitedHead = 32
	waitedPart = 32
)

// parseWait parses a struct waited. Its length must agree with its number of parts.
func parseWait(raw []byte) (id uint64, w wait, err error) {
	if len(raw) < waitedHead {
		return 0, w, fmt.Errorf("wait of %d bytes", len(raw))
	}
	at := binary.NativeEndian
	stage, parts := at.Uint32(raw[16:]), at.Uint32(raw[20:])
	if stage >= uint32(stages) || uint64(len(raw)) != waitedHead+waitedPart*uint64(parts) {
		return 0, w, fmt.Errorf("wait of %d bytes in stage %d with %d parts", len(raw), stage, parts)
	}
	w = wait{stage: Stage(stage), all: time.Duration(at.Uint64(raw[8:])), parts: make([]waitPart, parts)}
	for i := range w.parts {
		p := raw[waitedHead+i*waitedPart:]
		w.parts[i] = waitPart{who: at.Uint64(p), last: at.Uint64(p[8:]), ns: time.Duration(at.Uint64(p[16:])), kind: at.Uint32(p[24:])}
	}
	return at.Uint64(raw), w, nil
}
