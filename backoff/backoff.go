// Package backoff doubles a wait with each failure, and resets it after a time without failures. A
// wait is a time.Duration or a number of turns; it is 0 before the first failure.
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
