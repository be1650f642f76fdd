package latency

import "github.com/fairlead-project/fairlead/hist"

// subBits is HIST_SUB_BITS of maps.bpf.h, buckets is HIST_BUCKETS.
const (
	subBits = 3
	topBits = 34
	buckets = (topBits - subBits + 1) << subBits
)

// tally is struct tally of maps.bpf.h.
type tally struct {
	Coverage

	Window, Emitted uint32 // limit the rate of records

	Stage [stages]struct {
		Sum   uint64
		Count [buckets]uint64
	}
}

// histogram returns the histogram of one stage.
func (t *tally) histogram(s Stage) *hist.Histogram {
	h := &t.Stage[s]
	return &hist.Histogram{Sub: subBits, Counts: h.Count[:], Sum: h.Sum}
}

// tallies holds all tallies of one tenant.
type tallies [directions][protocols]tally

// since subtracts an earlier reading. If a counter went down, the tenant is a new one.
func (t *tallies) since(before *tallies) *tallies {
	out := new(tallies)
	*out = *t
	for d := range directions {
		for p := range protocols {
			now, was := &out[d][p], &before[d][p]
			if now.Seen < was.Seen {
				return t
			}
			for i, n := range was.counts() {
				*now.counts()[i] -= *n
			}
			for s := range stages {
				now.Stage[s].Sum -= was.Stage[s].Sum
				for i := range now.Stage[s].Count {
					now.Stage[s].Count[i] -= was.Stage[s].Count[i]
				}
			}
		}
	}
	return out
}

// Coverage counts the packets of one direction and protocol by the result of the measurement. It is
// the head of struct tally.
type Coverage struct {
	Seen       uint64 // sent at the container's device, or arrived there
	Matched    uint64 // measured between the container's device and the uplink
	Local      uint64 // between containers of this host, or from the host itself
	Unsampled  uint64 // arrived without a stamp while packets were passed over
	Unmatched  uint64 // dropped, for the host itself, or not followed
	Mismatched uint64 // the stamp belonged to another packet
	Evicted    uint64 // a newer packet took the place of the stamp
}

func (c *Coverage) counts() [7]*uint64 {
	return [...]*uint64{&c.Seen, &c.Matched, &c.Local, &c.Unsampled, &c.Unmatched, &c.Mismatched, &c.Evicted}
}

// Waiting returns the number of packets that are under way, or ended where no program saw it.
func (c Coverage) Waiting() uint64 {
	ended := c.Matched + c.Local + c.Unsampled + c.Unmatched + c.Mismatched + c.Evicted
	if ended > c.Seen {
		return 0 // counters are read one after the other
	}
	return c.Seen - ended
}

// Of returns the coverage of one direction and some protocols.
func (t Tenant) Of(d Direction, of ...Protocol) (c Coverage) {
	for _, p := range of {
		for i, n := range t.tallies[d][p].counts() {
			*c.counts()[i] += *n
		}
	}
	return c
}

// Histogram returns the times of some protocols' packets in a stage.
func (t Tenant) Histogram(d Direction, s Stage, of ...Protocol) *hist.Histogram {
	sum := hist.New(subBits, topBits)
	for _, p := range of {
		sum.Add(t.tallies[d][p].histogram(s))
	}
	return sum
}

// every lists all protocols.
func every() []Protocol { return []Protocol{TCP, UDP, ICMP, Other} }
