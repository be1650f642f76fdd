package latency

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/tenant/identity"
)

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

// isWait reports whether a sample is a struct waited, not a struct record. Their lengths differ.
func isWait(raw []byte) bool { return len(raw)%waitedPart == waitedHead%waitedPart }

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
