package traffic

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/policy"
)

// uplinks is the flag --uplink: devices, each with its rate in bit/s; 0 is unknown.
type uplinks map[string]uint64

// Set implements pflag.Value: it adds "eth0=1gbit,eth1".
func (u *uplinks) Set(s string) error {
	for one := range strings.SplitSeq(s, ",") {
		dev, text, given := strings.Cut(strings.TrimSpace(one), "=")
		if err := verb.CheckDevice(dev); err != nil {
			return err
		}
		var rate uint64
		if given {
			var err error
			if rate, err = policy.ParseRate(text); err != nil {
				return fmt.Errorf("%s: %w", dev, err)
			}
			if rate == 0 {
				return fmt.Errorf("%s: the rate is 0", dev)
			}
		}
		if _, twice := (*u)[dev]; twice {
			return errors.New(dev + " is given twice")
		}
		if *u == nil {
			*u = make(uplinks)
		}
		(*u)[dev] = rate
	}
	return nil
}

// String implements pflag.Value.
func (u *uplinks) String() string {
	var out []string
	for _, dev := range slices.Sorted(maps.Keys(*u)) {
		if rate := (*u)[dev]; rate > 0 {
			dev += "=" + policy.FormatRate(rate)
		}
		out = append(out, dev)
	}
	return strings.Join(out, ",")
}

// Type implements pflag.Value.
func (u *uplinks) Type() string { return "device[=rate]" }
