package traffic

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/policy"
)

// giveRate is how an operator gives the rate of an uplink.
const giveRate = "give it by the agent's flag --uplink %s=1gbit"

// rate gives the rate of an uplink in bit/s, and who says so; 0 and "" where nobody
// does. The operator's word counts before that of the driver.
func (f *Traffic) rate(l netdev.Link) (rate uint64, by string, err error) {
	if rate = f.cfg.Uplinks[l.Name]; rate > 0 {
		return rate, "the operator", nil
	}
	if rate, err = f.host.Speed(l.Index); rate > 0 {
		by = "its driver"
	}
	return rate, by, err
}

// unkept is the error of what is not kept of a container's due, as the rates of some
// uplinks are not known. All the rest of it is in force.
func (f *Traffic) unkept(d due) error {
	var errs []error
	for _, index := range slices.Sorted(maps.Keys(f.uplinks)) {
		u := f.uplinks[index]
		var keys []string
		for _, k := range u.link.Unkept(d.egress) {
			keys = append(keys, "net."+k)
		}
		for _, k := range u.ingress.link.Unkept(d.ingress) {
			keys = append(keys, "net.ingress."+k)
		}
		if len(keys) == 0 {
			continue
		}
		is := "is"
		if len(keys) > 1 {
			is = "are"
		}
		errs = append(errs, fmt.Errorf("uplink %s: %s %s not kept, as the rate of the link is not known: its driver does not tell ("+giveRate+")",
			u.link.Name, strings.Join(keys, ", "), is, u.link.Name))
	}
	return errors.Join(errs...)
}

// sharesReceived says whether anything of what a tenant is due can be kept where
// all packets of a link come in.
func sharesReceived(l model.Link, n policy.Net) bool { return l.Rate > 0 || n.Ceil > 0 }
