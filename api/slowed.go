package api

import (
	"cmp"
	"slices"
)

// After returns how each container of f stands, over the time since an earlier frame of the same
// agent. docs/slowed.md defines each figure. A loss that neither frame has measured is absent: it
// counts as none.
func (f Frame) After(before Frame) Overview {
	out := Overview{Since: before.Taken, Taken: f.Taken, Rows: make([]OverviewRow, 0, len(f.Containers))}
	parts := f.Reports.since(before.Reports)
	for _, c := range f.Containers {
		row := OverviewRow{Container: c.ID, Name: c.Name, Pod: c.Pod, Namespace: c.Namespace, InForce: inForce(c)}
		for _, fill := range parts {
			row.add(fill(&row))
		}
		slices.SortStableFunc(row.By, func(a, b Slowdown) int { return cmp.Compare(b.Slowed, a.Slowed) })
		out.Rows = append(out.Rows, row)
	}
	slices.SortFunc(out.Rows, func(a, b OverviewRow) int {
		return cmp.Or(cmp.Compare(b.Slowed, a.Slowed), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Container, b.Container))
	})
	return out
}

// inForce lists the features that policy asks to do something for a container.
func inForce(c Container) (names []string) {
	for _, s := range c.Features {
		switch {
		case !s.Asked:
		case s.State == StateDone:
			names = append(names, s.Feature)
		default:
			names = append(names, s.Feature+" "+s.State)
		}
	}
	return names
}

// losses are what a container loses at one resource, as parts of its speed.
type losses []Slowdown

func (l losses) sum() (s float64) {
	for _, x := range l {
		s += x.Slowed
	}
	return s
}

// add takes the losses at one more resource into a row. Work that needs several resources is slowed
// no more than at the worst of them, so all losses together add up to that.
func (r *OverviewRow) add(l losses) {
	if len(l) == 0 {
		return
	}
	type key struct {
		cause   string
		culprit ID
	}
	at := make(map[key]int, len(r.By)+len(l))
	for i, x := range r.By {
		at[key{x.Cause, x.Culprit}] = i
	}
	for _, x := range l {
		i, known := at[key{x.Cause, x.Culprit}]
		switch {
		case x.Slowed <= 0:
		case known:
			r.By[i].Slowed += x.Slowed
		default:
			at[key{x.Cause, x.Culprit}] = len(r.By)
			r.By = append(r.By, x)
		}
	}
	r.Slowed = max(r.Slowed, min(l.sum(), 1))
	if all := losses(r.By).sum(); all > 0 {
		for i := range r.By {
			r.By[i].Slowed *= r.Slowed / all
		}
	}
}

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
