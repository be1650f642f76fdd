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
// as much as at the worst of them at most, so the losses at all of them together add up to that.
func (r *OverviewRow) add(l losses) {
	sum := l.sum()
	if sum <= 0 {
		return
	}
	all := losses(r.By).sum() + sum
	r.By, r.Slowed = append(r.By, l...), max(r.Slowed, min(sum, 1))
	for i := range r.By {
		r.By[i].Slowed *= r.Slowed / all
	}
}
