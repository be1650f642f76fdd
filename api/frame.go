package api

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"time"
)

// Frame returns everything that the agent reports, read at one moment.
func (c *Client) Frame(ctx context.Context) (out Frame, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/frame", nil, &out)
}

// Overview returns the agent's latest overview of the containers.
func (c *Client) Overview(ctx context.Context) (out Overview, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/overview", nil, &out)
}

// Frame is everything that an agent reports, read at one moment. Views show the difference between
// two frames ([Frame.After]), and a recording keeps a frame every few seconds.
type Frame struct {
	Taken      time.Time   `json:"taken" doc:"when the agent read it"`
	Containers []Container `json:"containers" doc:"the containers that run, as of /v1/containers"`
	Reports
}

// Overview describes each container over the time from Since to Taken.
type Overview struct {
	Since time.Time     `json:"since" doc:"start of the time"`
	Taken time.Time     `json:"taken" doc:"end of the time"`
	Rows  []OverviewRow `json:"rows" doc:"one element for each container, the most slowed first, then by name"`
}

// The causes by which neighbours slow a container, in Slowdown.Cause.
const (
	SlowedByPackets = "packets" // CPU time of the container that packets of others took
	SlowedByCPU     = "cpu"     // waits for a CPU that others used, beside a reservation
	SlowedByUplink  = "uplink"  // waits behind others in the queue of an uplink, below the guaranteed rate
	SlowedByDisk    = "disk"    // less I/O than reserved
)

// OverviewRow describes one container.
type OverviewRow struct {
	Container ID         `json:"container,string" doc:"id of the container"`
	Name      string     `json:"name" doc:"name of the container"`
	Pod       string     `json:"pod,omitempty" doc:"Kubernetes pod name"`
	Namespace string     `json:"namespace,omitempty" doc:"Kubernetes namespace"`
	Slowed    float64    `json:"slowed" doc:"how much slower the container runs because of its neighbours: 1 minus its speed by the speed that it would have without them, 0 to 1"`
	By        []Slowdown `json:"by,omitempty" doc:"by what and by whom, the largest first"`

	CPU        float64      `json:"cpu" doc:"CPU time that its control group was charged for, in seconds per second"`
	NetworkCPU float64      `json:"network_cpu" doc:"CPU time of its packets, in seconds per second"`
	Egress     OverviewRate `json:"egress" doc:"bandwidth that it sends"`
	Ingress    OverviewRate `json:"ingress" doc:"bandwidth that it receives"`
	Added      float64      `json:"added_p99_seconds,omitempty" doc:"99th percentile of the latency that the host adds to its packets, since they are measured; absent where they are not"`
	IOPS       float64      `json:"iops" doc:"reads and writes per second of all disks"`
	Reserved   float64      `json:"reserved_iops,omitempty" doc:"reads and writes per second that it has reserved"`
	InForce    []string     `json:"in_force,omitempty" doc:"features that do something for it: NAME, or NAME STATE where that is not done"`
}

// OverviewRate is the bandwidth of one direction of one container.
type OverviewRate struct {
	Achieved float64 `json:"achieved_bits_per_second" doc:"bandwidth used"`
	Due      uint64  `json:"guaranteed_bits_per_second,omitempty" doc:"bandwidth guaranteed at the uplinks; absent without a guarantee"`
	Ceil     uint64  `json:"ceil_bits_per_second,omitempty" doc:"the most that it gets; absent without a bound of policy"`
}

// Slowdown is one reason why a container runs slower.
type Slowdown struct {
	Cause   string  `json:"cause" doc:"packets, cpu, uplink or disk"`
	Slowed  float64 `json:"slowed" doc:"part of slowed"`
	Culprit ID      `json:"culprit,omitempty,string" doc:"id of the container that is to blame; absent for the host or if unknown"`
	Name    string  `json:"name,omitempty" doc:"name of that container"`
}

// After describes each container of f over the time since an earlier frame of the same agent.
// docs/slowed.md defines each figure. A loss that neither frame has measured is absent, and counts
// as none.
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

// inForce lists the features whose policy is in force for a container.
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

// add adds the losses at one more resource to a row. Work that needs several resources is slowed by
// no more than the worst of them, so all losses together add up to that one.
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

// since returns the rows of a reading, each as sub computes it from the row and the earlier row
// with the same key, or the zero row if there was none.
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

// less returns the increase of a counter. A counter that has decreased was reset in between: its
// increase is its value.
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

// History says who slowed whom over a long time, according to a recording. [History.Add] builds it
// from overviews.
type History struct {
	Since   time.Time       `json:"since" doc:"start of the first overview"`
	Taken   time.Time       `json:"taken" doc:"end of the last overview"`
	Seconds float64         `json:"seconds" doc:"time that the overviews cover; less than from since to taken where nothing was recorded"`
	Rows    []HistoryRow    `json:"rows" doc:"one element for each container, that which lost most first"`
	Moments []HistoryMoment `json:"moments" doc:"the times in which one container was slowed by 5 % or more, those in which it lost most first; at most 20"`

	open map[ID]*HistoryMoment // moments that may continue
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

// HistoryBlame is one reason why a container ran slower.
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
	momentSlowed = 0.05            // least slowdown of a moment
	maxMoments   = 20              // moments listed
	longestFrame = 2 * time.Minute // longest time between two frames of a recording; beyond, there is a gap
)

// AddFrames adds the time between two frames of a recording. It ignores a gap, which is a longer
// time than a recording leaves between frames, or a clock that was set back.
func (h *History) AddFrames(before, f Frame) {
	if d := f.Taken.Sub(before.Taken); d > 0 && d <= longestFrame {
		h.Add(f.After(before))
	}
}

// Add adds an overview. Overviews come in order of time, and Finish follows the last one.
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

// blame adds the slowdowns of one overview to a sum.
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

// closed ends the moment of a container, if there is one. Only the worst moments are kept.
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

// Finish returns the history of all overviews added.
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
