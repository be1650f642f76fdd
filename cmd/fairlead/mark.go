package main

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/fairlead-project/fairlead/datapath/identity"
)

// markMask is the flag --mark-mask: the part of the mark that carries a slot.
type markMask uint32

// Set implements pflag.Value: it accepts 0xffff0000, or the same in decimal.
func (m *markMask) Set(s string) error {
	n, err := strconv.ParseUint(s, 0, 32)
	if err != nil {
		return errors.New("not a 32-bit number, as 0xffff0000")
	}
	if _, err := identity.MarkShift(uint32(n)); err != nil {
		return err
	}
	*m = markMask(n)
	return nil
}

// String implements pflag.Value.
func (m *markMask) String() string { return fmt.Sprintf("%#x", uint32(*m)) }

// Type implements pflag.Value.
func (m *markMask) Type() string { return "mask" }
