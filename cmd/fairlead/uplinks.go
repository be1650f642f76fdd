package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/policy"
)

// uplinks is the flag --uplink: devices, each with its rate in bit/s; 0 is unknown.
type uplinks map[string]uint64

// maxDevice is the longest name of a device (IFNAMSIZ, without the final NUL).
const maxDevice = 15

// Set implements pflag.Value: it adds "eth0=1gbit,eth1".
func (u *uplinks) Set(s string) error {
	for one := range strings.SplitSeq(s, ",") {
		dev, text, given := strings.Cut(strings.TrimSpace(one), "=")
		if err := checkDevice(dev); err != nil {
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

// checkDevice returns an error unless name is a valid name of a device.
func checkDevice(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > maxDevice || strings.ContainsAny(name, "/: \t") {
		return fmt.Errorf("%q is not a device name", name)
	}
	return nil
}

// devices is a flag that lists devices.
type devices []string

// Set implements pflag.Value: it adds "eth0,eth1".
func (d *devices) Set(s string) error {
	list := slices.Clone(*d)
	for name := range strings.SplitSeq(s, ",") {
		name = strings.TrimSpace(name)
		if err := checkDevice(name); err != nil {
			return err
		}
		if slices.Contains(list, name) {
			return errors.New(name + " is given twice")
		}
		list = append(list, name)
	}
	*d = list
	return nil
}

// String implements pflag.Value.
func (d *devices) String() string { return strings.Join(*d, ",") }

// Type implements pflag.Value.
func (d *devices) Type() string { return "device" }
