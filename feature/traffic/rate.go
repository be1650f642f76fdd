package traffic

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// giveRate tells an operator how to set the rate of an uplink.
const giveRate = "give its rate with the agent's flag --uplink %[1]s=1gbit, or measure it with `fairlead traffic calibrate`"

// rate returns the rate of an uplink in bit/s and its source; 0 and "" if it is unknown. The
// operator's value comes first, then the driver's, then a measurement.
func (f *Traffic) rate(l netdev.Link) (rate uint64, by string, err error) {
	if rate = f.cfg.Uplinks[l.Name]; rate > 0 {
		return rate, "as the operator says", nil
	}
	if rate, err = f.host.Speed(l.Index); rate > 0 || err != nil {
		return rate, "as its driver says", err
	}
	if c, known := f.calibrated(l); known {
		return c.Rate, fmt.Sprintf("as it was measured to %s on %s", c.To, c.When.Format(time.DateOnly)), nil
	}
	return 0, "", nil
}

// Examine implements feature.Examiner: a finding per uplink, with its rate and the source.
func (f *Traffic) Examine() []probe.Finding {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host == nil {
		return nil
	}
	links, err := f.listing.Links()
	if err != nil {
		return []probe.Finding{uplinkFinding("uplinks", probe.Verdict{Level: probe.Unavailable, Why: err.Error()}, "")}
	}
	var list []probe.Finding
	for _, l := range links {
		if !f.isUplink(l, links) {
			continue
		}
		rate, by, err := f.rate(l)
		switch {
		case err != nil:
			list = append(list, uplinkFinding(l.Name, probe.Verdict{Level: probe.Unavailable, Why: err.Error()}, ""))
		case rate == 0:
			list = append(list, uplinkFinding(l.Name, probe.Verdict{
				Level: probe.Degraded, Why: "its rate is not known, as its driver does not tell: no net.rate and no net.latency can be kept; net.ceil, net.weight and net.priority are",
				Mend: fmt.Sprintf(giveRate, l.Name),
			}, ""))
		default:
			list = append(list, uplinkFinding(l.Name, probe.Verdict{Level: probe.Full}, policy.FormatRate(rate)+", "+by))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.cfg.Uplinks)) {
		if !slices.ContainsFunc(links, func(l netdev.Link) bool { return l.Name == name }) {
			list = append(list, uplinkFinding(name, probe.Verdict{Level: probe.Unavailable, Why: "there is no device of that name", Mend: "name another by the agent's flag --uplink"}, ""))
		}
	}
	if len(list) == 0 {
		list = append(list, uplinkFinding("uplinks", probe.Verdict{
			Level: probe.Degraded, Why: "no hardware is up: net.ceil and net.ingress.ceil hold at veths, and nothing else can be kept",
			Mend: "name the devices by which packets leave by the agent's flag --uplink",
		}, ""))
	}
	return list
}

func uplinkFinding(device string, v probe.Verdict, detail string) probe.Finding {
	return probe.Finding{Capability: device, Area: "uplink", Verdict: v, Detail: detail}
}

// sharesReceived reports whether the ingress of a link can enforce any part of a tenant's due.
func sharesReceived(l model.Link, n policy.Net) bool { return l.Rate > 0 || n.Ceil > 0 }
