package api

import (
	"cmp"
	"slices"
	"time"
)

// History says who was slowed by whom over a long time, from a recording. [History.Add] makes it of
// overviews.
type History struct {
	Since   time.Time       `json:"since" doc:"start of the first overview"`
	Taken   time.Time       `json:"taken" doc:"end of the last overview"`
	Seconds float64         `json:"seconds" doc:"time that the overviews cover; less than from since to taken where nothing was recorded"`
	Rows    []HistoryRow    `json:"rows" doc:"one element for each container, that which lost most first"`
	Moments []HistoryMoment `json:"moments" doc:"the times in which one container was slowed by 5 % or more, those in which it lost most first; at most 20"`

	open map[ID]*HistoryMoment // that may go on
}

// HistoryRow is one container over the whole time.
type HistoryRow struct {
	Container ID             `json:"container,string" doc:"id of the container"`
	Name      string         `json:"name" doc:"name of the container"`
	Pod       string         `json:"pod,omitempty" doc:"Kubernetes pod name"`
	Namespace string         `json:"namespace,omitempty" doc:"Kubernetes namespace"`
	Seconds   float64        `json:"seconds" doc:"time that it was there"`
	Slowed    float64        `json:"slowed" doc:"how much slower it ran because of its neighbours, in the mean, as of an overview"`
	Lost      float64        `json:"lost_seconds" doc:"slowed times seconds"`
	Worst     float64        `json:"worst" doc:"the largest slowed of one overview"`
	WorstAt   time.Time      `json:"worst_at,omitzero" doc:"end of that overview; absent if it was never slowed"`
	By        []HistoryBlame `json:"by,omitempty" doc:"by what and by whom, the largest first"`
}

// HistoryBlame is one reason for which a container ran slower.
type HistoryBlame struct {
	Cause   string  `json:"cause" doc:"packets, cpu, uplink or disk"`
	Culprit ID      `json:"culprit,omitempty,string" doc:"id of the container that is to blame; absent for the host or if unknown"`
	Name    string  `json:"name,omitempty" doc:"name of that container"`
	Lost    float64 `json:"lost_seconds" doc:"part of lost_seconds"`
}

// HistoryMoment is a time in which one container was slowed in every overview.
type HistoryMoment struct {
	Since     time.Time      `json:"since" doc:"start"`
	Taken     time.Time      `json:"taken" doc:"end"`
	Container ID             `json:"container,string" doc:"id of the container"`
	Name      string         `json:"name" doc:"name of the container"`
	Slowed    float64        `json:"slowed" doc:"slowed in the mean"`
	Worst     float64        `json:"worst" doc:"the largest slowed of one overview"`
	Lost      float64        `json:"lost_seconds" doc:"slowed times the length"`
	By        []HistoryBlame `json:"by,omitempty" doc:"by what and by whom, the largest first"`
}

const (
	momentSlowed = 0.05            // from which on a container is slowed in a moment
	maxMoments   = 20              // that are listed
	longestFrame = 2 * time.Minute // between two frames; beyond, nothing was recorded in between
)

// AddFrames adds what happened between two frames of a recording. Frames with a longer time between
// them than a recording leaves, or the clock set back, are a gap and count for nothing.
func (h *History) AddFrames(before, f Frame) {
	if d := f.Taken.Sub(before.Taken); d > 0 && d <= longestFrame {
		h.Add(f.After(before))
	}
}

// Add adds an overview. Overviews come in the order of their times. Finish ends with the last.
func (h *History) Add(o Overview) {
	seconds := o.Taken.Sub(o.Since).Seconds()
	if h.open == nil {
		h.Since, h.open = o.Since, make(map[ID]*HistoryMoment)
	}
	h.Taken = o.Taken
	h.Seconds += seconds
	index := make(map[ID]int, len(h.Rows))
	for i, r := range h.Rows {
		index[r.Container] = i
	}
	slowed := make(map[ID]bool)
	for _, of := range o.Rows {
		i, ok := index[of.Container]
		if !ok {
			i = len(h.Rows)
			h.Rows = append(h.Rows, HistoryRow{Container: of.Container})
		}
		r := &h.Rows[i]
		r.Name, r.Pod, r.Namespace = of.Name, of.Pod, of.Namespace
		r.Seconds += seconds
		r.Lost += of.Slowed * seconds
		if of.Slowed > r.Worst {
			r.Worst, r.WorstAt = of.Slowed, o.Taken
		}
		r.By = blame(r.By, of.By, seconds)
		if of.Slowed < momentSlowed {
			continue
		}
		slowed[of.Container] = true
		m := h.open[of.Container]
		if m == nil || !m.Taken.Equal(o.Since) { // also after a gap
			h.closed(of.Container)
			m = &HistoryMoment{Since: o.Since, Container: of.Container}
			h.open[of.Container] = m
		}
		m.Name, m.Taken, m.Worst = of.Name, o.Taken, max(m.Worst, of.Slowed)
		m.Lost += of.Slowed * seconds
		m.By = blame(m.By, of.By, seconds)
	}
	for id := range h.open {
		if !slowed[id] {
			h.closed(id)
		}
	}
}

// blame adds what one overview says to a sum.
func blame(sum []HistoryBlame, by []Slowdown, seconds float64) []HistoryBlame {
	for _, s := range by {
		i := slices.IndexFunc(sum, func(b HistoryBlame) bool { return b.Cause == s.Cause && b.Culprit == s.Culprit })
		if i < 0 {
			i = len(sum)
			sum = append(sum, HistoryBlame{Cause: s.Cause, Culprit: s.Culprit})
		}
		sum[i].Name = cmp.Or(s.Name, sum[i].Name)
		sum[i].Lost += s.Slowed * seconds
	}
	return sum
}

// closed ends the moment of a container, if it has one. Only the worst are kept.
func (h *History) closed(id ID) {
	m := h.open[id]
	if m == nil {
		return
	}
	delete(h.open, id)
	m.Slowed = m.Lost / m.Taken.Sub(m.Since).Seconds()
	sortBlame(m.By)
	h.Moments = append(h.Moments, *m)
	slices.SortFunc(h.Moments, func(a, b HistoryMoment) int {
		return cmp.Or(cmp.Compare(b.Lost, a.Lost), a.Since.Compare(b.Since), cmp.Compare(a.Container, b.Container))
	})
	h.Moments = h.Moments[:min(len(h.Moments), maxMoments)]
}

func sortBlame(by []HistoryBlame) {
	slices.SortStableFunc(by, func(a, b HistoryBlame) int { return cmp.Compare(b.Lost, a.Lost) })
}

// Finish returns the history of what was added.
func (h *History) Finish() History {
	for id := range h.open {
		h.closed(id)
	}
	h.Rows = append([]HistoryRow{}, h.Rows...) // in JSON an empty list, not null
	h.Moments = append([]HistoryMoment{}, h.Moments...)
	for i := range h.Rows {
		r := &h.Rows[i]
		r.Slowed = r.Lost / r.Seconds
		sortBlame(r.By)
	}
	slices.SortFunc(h.Rows, func(a, b HistoryRow) int {
		return cmp.Or(cmp.Compare(b.Lost, a.Lost), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Container, b.Container))
	})
	return *h
}
