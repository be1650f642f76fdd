package policy

import (
	"errors"
	"fmt"
	"math/bits"
)

// ErrOverLink is returned, wrapped, for guarantees that a link cannot keep.
var ErrOverLink = errors.New("guaranteed rates exceed the link")

// guaranteed is the part of a link that can be promised, in percent. The rest is for headers that
// the rates do not count, and for the host itself.
const guaranteed = 95

// FitLink checks that the guaranteed rates of the tenants of one link add up to at most 95 % of it;
// all in bit/s. It ignores zero rates, which guarantee nothing. The error wraps [ErrOverLink] and
// names the sum. The caller knows which rates share which link.
func FitLink(link uint64, rates []uint64) error {
	var sum uint64
	tenants, overflow := 0, false
	for _, r := range rates {
		var carry uint64
		if sum, carry = bits.Add64(sum, r, 0); carry != 0 {
			overflow = true
		}
		if r > 0 {
			tenants++
		}
	}
	limit := link/100*guaranteed + link%100*guaranteed/100
	if !overflow && sum <= limit {
		return nil
	}
	text := FormatRate(sum)
	if overflow {
		text = "more than " + FormatRate(1<<64-1)
	}
	return fmt.Errorf("%w: the sum of %d is %s, and %d %% of the %s link is %s", ErrOverLink, tenants, text, guaranteed, FormatRate(link), FormatRate(limit))
}
