package verb

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/policy"
)

// maxDevice is the longest name of a device (IFNAMSIZ, without the final NUL).
const maxDevice = 15

// CheckDevice returns an error unless name is a valid name of a device.
func CheckDevice(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > maxDevice || strings.ContainsAny(name, "/: \t") {
		return fmt.Errorf("%q is not a device name", name)
	}
	return nil
}

// Devices is a flag that lists devices.
type Devices []string

// Set implements pflag.Value: it adds "eth0,eth1".
func (d *Devices) Set(s string) error {
	list := slices.Clone(*d)
	for name := range strings.SplitSeq(s, ",") {
		name = strings.TrimSpace(name)
		if err := CheckDevice(name); err != nil {
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
func (d *Devices) String() string { return strings.Join(*d, ",") }

// Type implements pflag.Value.
func (d *Devices) Type() string { return "device" }

// sizeFlag is a flag whose value is a number of bytes, in the units of policy.
type sizeFlag int64

func (s *sizeFlag) Set(text string) error {
	n, err := policy.ParseSize(text)
	if err != nil {
		return err
	}
	*s = sizeFlag(min(n, 1<<50))
	return nil
}

func (s *sizeFlag) String() string { return policy.FormatSize(uint64(*s)) }

func (s *sizeFlag) Type() string { return "size" }
