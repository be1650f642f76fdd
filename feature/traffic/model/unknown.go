package model

// Stand-ins for an unknown link rate, bit/s.
const (
	fastest = 1 << 40 // faster than any link: the device limits a class before HTB does
	usual   = 1_000_000_000
	// slowest is divided by weight before any priority counts, so that a container with a high one
	// leaves at least that to all others, the host included.
	slowest = 10_000_000
)

// Unkept lists those of a tenant's keys that are not kept on this link because its rate is unknown.
// A ceil is kept all the same. So are weights and priorities of what is sent: the device takes no
// more than the link carries, and packets wait in their order. What was received has passed the
// link, and nothing waits.
func (l Link) Unkept(keys []string) (unkept []string) {
	for _, k := range keys {
		if l.Rate == 0 && (k == "rate" || k == "latency" || l.Received && k != "ceil") {
			unkept = append(unkept, k)
		}
	}
	return unkept
}

// unknown is Compute for a link with an unknown rate.
func unknown(l Link, tenants []Tenant) (Plan, error) {
	kept := make([]Tenant, len(tenants))
	for i, t := range tenants {
		t.Rate, t.Latency = 0, 0
		if l.Received {
			t.Weight, t.Priority = 0, nil
		}
		kept[i] = t
	}
	l.Rate, l.HFSC = fastest, false
	ts, err := admit(l, kept)
	if err != nil {
		return Plan{}, err
	}
	p, err := Plan{Link: l}.share(ts, slowest)
	if err != nil {
		return Plan{}, err
	}
	p.Link.Rate = 0
	for i := range p.Classes {
		c := &p.Classes[i]
		c.Guaranteed = 0
		if c.Ceil == fastest {
			c.Ceil = 0
		}
	}
	return p, nil
}
