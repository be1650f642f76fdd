package blockio

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/policy"
)

// namedDisks is the flag --kubelet-disk.
type namedDisks policy.Disks

// Set implements pflag.Value: it adds "data=/dev/vdb,log=/dev/vdc".
func (d *namedDisks) Set(s string) error {
	for one := range strings.SplitSeq(s, ",") {
		name, device, _ := strings.Cut(strings.TrimSpace(one), "=")
		if err := errors.Join(policy.CheckDiskName(name), policy.CheckDisk(device)); err != nil {
			return err
		}
		if _, twice := (*d)[name]; twice || slices.Contains(slices.Collect(maps.Values(*d)), device) {
			return errors.New(one + ": the name or the disk is given twice")
		}
		if *d == nil {
			*d = make(namedDisks)
		}
		(*d)[name] = device
	}
	return nil
}

// String implements pflag.Value.
func (d *namedDisks) String() string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(*d)) {
		out = append(out, name+"="+(*d)[name])
	}
	return strings.Join(out, ",")
}

// Type implements pflag.Value.
func (d *namedDisks) Type() string { return "name=device" }
