package api

import "slices"

// since returns the rows of a reading with what was counted since an earlier one:
// each as sub makes it of the row and the one before with the same key, or the
// zero row where there was none.
func since[K comparable, T any](rows, before []T, key func(T) K, sub func(row, was T) T) []T {
	was := make(map[K]T, len(before))
	for _, row := range before {
		was[key(row)] = row
	}
	rows = slices.Clone(rows)
	for i, row := range rows {
		rows[i] = sub(row, was[key(row)])
	}
	return rows
}

// less is how much a counter has grown. One that has become smaller was reset
// in between, and has counted what it shows since.
func less[N uint64 | float64](now, before N) N {
	if now < before {
		return now
	}
	return now - before
}

// lessOf is less of counters that may be absent.
func lessOf(now, before *float64) *float64 {
	if now == nil || before == nil {
		return now
	}
	d := less(*now, *before)
	return &d
}
