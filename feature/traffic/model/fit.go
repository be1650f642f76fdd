package model

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/fairlead-project/fairlead/policy"
)

// ErrOverLink is wrapped by a Refusal for guarantees that a link cannot keep.
var ErrOverLink = errors.New("guaranteed rates exceed the link")

// admitted is the part of a link that can be promised, in percent. The rest is for headers that the
// rates do not count, and for the host itself.
const admitted = 95

// Admitted returns how much of a link can be promised, in bit/s.
func Admitted(link uint64) uint64 { return link/100*admitted + link%100*admitted/100 }

// fitLink checks that the guaranteed rates of the tenants of one link add up to at most 95 % of it;
// all in bit/s. It ignores zero rates, which guarantee nothing. The error wraps [ErrOverLink] and
// names the sum.
func fitLink(link uint64, rates []uint64) error {
	var sum uint64
	tenants, overflow := 0, false
	for _, r := range rates {
		all, carry := bits.Add64(sum, r, 0)
		sum, overflow = all, overflow || carry != 0
		if r > 0 {
			tenants++
		}
	}
	limit := Admitted(link)
	if !overflow && sum <= limit {
		return nil
	}
	text := policy.FormatRate(sum)
	if overflow {
		text = "more than " + policy.FormatRate(1<<64-1)
	}
	return fmt.Errorf("%w: the sum of %d is %s, and %d %% of the %s link is %s", ErrOverLink, tenants, text, admitted, policy.FormatRate(link), policy.FormatRate(limit))
}
