// Package backoff is the rule by which a wait doubles with each failure, and forgets them. A wait is
// a time.Duration, or a number of turns; 0 is that of somebody who has not failed yet.
package backoff

// Next returns the wait after wait: first, and then twice as much each time, up to most.
func Next[T ~int | ~int64](wait, first, most T) T { return min(max(2*wait, first), most) }

// Again is Next, but first once all has been well for longer than forget.
func Again[T ~int | ~int64](wait, first, most, well, forget T) T {
	if well > forget {
		return first
	}
	return Next(wait, first, most)
}

// Nth returns the wait after n failures in a row.
func Nth[T ~int | ~int64](n int, first, most T) (wait T) {
	for ; n > 0 && wait < most; n-- {
		wait = Next(wait, first, most)
	}
	return wait
}
