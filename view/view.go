// Package view is the common part of the terminal view (view/tui) and the page (view/web): sources
// of frames, their history, and the columns with their order and format. It draws nothing, and
// computes no figure: [api.Frame.After] does.
package view

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"math"
	"slices"
	"time"
	"unsafe"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/record"
)

// Span is the time that the plots of one container cover.
const Span = 10 * time.Minute

// History holds the newest overviews of successive frames, in order. The zero value keeps as many
// as fit in memory. A copy does not change when the original grows.
type History struct {
	Keep time.Duration // from the oldest overview to the newest; 0: no bound
	Cut  bool          // older ones were dropped for lack of room

	last *api.Frame
	list []api.Overview
	size int // memory of list
}

// ErrRoom means that a History has dropped older overviews.
var ErrRoom = errors.New("what is older is left out: it takes too much memory")

// room bounds the memory of overviews, as frames may come from any user.
const room = 256 << 20

// sizeOf estimates the memory of an overview.
func sizeOf(o api.Overview) int {
	size := int(unsafe.Sizeof(o)) + len(o.Rows)*int(unsafe.Sizeof(api.OverviewRow{}))
	for _, r := range o.Rows {
		size += len(r.Name) + len(r.Pod) + len(r.Namespace) + len(r.By)*int(unsafe.Sizeof(api.Slowdown{}))
		for _, s := range r.By {
			size += len(s.Cause) + len(s.Name)
		}
		for _, name := range r.InForce {
			size += int(unsafe.Sizeof(name)) + len(name)
		}
	}
	return size
}

// drop drops the oldest n overviews, and further ones until the rest fits.
func (h *History) drop(n int) {
	gone := 0
	for ; gone < len(h.list) && (gone < n || h.size > room); gone++ {
		h.size -= sizeOf(h.list[gone])
	}
	if h.Cut = h.Cut || gone > n; gone > 0 {
		h.list = slices.Clone(h.list[gone:])
	}
}

// Add adds the next frame of a source, and returns the overview of the time since the previous
// frame. ok is false for the first frame, and for one that is not later than the previous one.
func (h *History) Add(f api.Frame) (o api.Overview, ok bool) {
	before := h.last
	if before != nil && !f.Taken.After(before.Taken) {
		return o, false
	}
	h.last = &f
	if before == nil {
		return o, false
	}
	o = f.After(*before)
	h.list = append(h.list, o)
	h.size += sizeOf(o)
	old, _ := h.find(o.Taken.Add(-h.Keep))
	if h.Keep == 0 {
		old = 0
	}
	h.drop(old)
	return o, true
}

// Load makes a History of the frames that a source recorded between two times. If parts cannot be
// read or kept, it returns the rest, and the first error.
func Load(ctx context.Context, s Source, from, to time.Time) (h *History, first error) {
	h = new(History)
	for f, err := range s.Frames(ctx, from, to, 0) {
		if err == nil {
			h.Add(f)
		} else if first == nil {
			first = err
		}
	}
	if h.Cut && first == nil {
		first = ErrRoom
	}
	return h, first
}

// Before prepends the overviews of old that end before h begins.
func (h *History) Before(old *History) {
	n := len(old.list)
	if len(h.list) > 0 {
		n, _ = old.find(h.list[0].Since.Add(1))
	}
	for _, o := range old.list[:n] {
		h.size += sizeOf(o)
	}
	h.list = slices.Concat(old.list[:n], h.list)
	h.drop(0)
}

// Last returns the newest frame; nil if there is none. The caller must not change it.
func (h *History) Last() *api.Frame { return h.last }

// Len returns the number of overviews.
func (h *History) Len() int { return len(h.list) }

// Bounds returns the ends of the first and the last overview; zero without overviews.
func (h *History) Bounds() (first, last time.Time) {
	if len(h.list) == 0 {
		return first, last
	}
	return h.list[0].Taken, h.list[len(h.list)-1].Taken
}

// find returns the index of the first overview that ends at or after t, and whether it ends at t.
func (h *History) find(t time.Time) (int, bool) {
	return slices.BinarySearchFunc(h.list, t, func(o api.Overview, t time.Time) int { return o.Taken.Compare(t) })
}

// At returns the last overview that ends at or before t; ok is false if there is none.
func (h *History) At(t time.Time) (o api.Overview, ok bool) {
	return h.Step(t, 0)
}

// Step returns the overview n places after the last one that ends at or before t; before that one
// if n is negative. ok is false beyond the ends of the history.
func (h *History) Step(t time.Time, n int) (o api.Overview, ok bool) {
	i, exact := h.find(t)
	if !exact {
		i--
	}
	if i += n; i < 0 || i >= len(h.list) {
		return o, false
	}
	return h.list[i], true
}

// Worst returns the overview with the largest slowdown, the first of several; ok: there is one.
func (h *History) Worst() (o api.Overview, ok bool) {
	worst := 0.0
	for _, x := range h.list {
		if len(x.Rows) > 0 && x.Rows[0].Slowed > worst {
			o, ok, worst = x, true, x.Rows[0].Slowed
		}
	}
	return o, ok
}

// Series returns one figure of a container over a span that ends at to. It has n parts of equal
// length, the oldest first: the largest value in each, NaN if there is none. The parts begin at
// multiples of their length, so that a later Series repeats most values of an earlier one.
func (h *History) Series(id api.ID, figure func(api.OverviewRow) float64, to time.Time, span time.Duration, n int) []float64 {
	part := span / time.Duration(n)
	end := to.Truncate(part)
	if end.Before(to) {
		end = end.Add(part)
	}
	out := slices.Repeat([]float64{math.NaN()}, n)
	first, _ := h.find(end.Add(-time.Duration(n)*part + 1))
	for _, o := range h.list[first:] {
		if o.Taken.After(to) {
			break
		}
		i := n - 1 - int(end.Sub(o.Taken)/part)
		for _, r := range o.Rows {
			if v := figure(r); r.Container == id && !(out[i] >= v) {
				out[i] = v
			}
		}
	}
	return out
}

// Share is how much a neighbour has slowed a container, or a container its neighbour.
type Share struct {
	Other api.ID
	Name  string // of the other; "" if unknown
	Cause string
	Now   float64 // slowdown of the victim in the last overview
	Mean  float64 // mean over the span
}

// Blame sums up who has slowed each container (by) and whom each has slowed (of), over a span that
// ends at to. The largest mean comes first.
func (h *History) Blame(to time.Time, span time.Duration) (by, of map[api.ID][]Share) {
	type loss struct {
		victim, culprit api.ID
		cause           string
	}
	type sum struct {
		Share
		victim string
	}
	var total time.Duration
	sums := make(map[loss]*sum)
	first, _ := h.find(to.Add(-span + 1))
	last, exact := h.find(to)
	if exact {
		last++
	}
	for i := first; i < last; i++ {
		o := h.list[i]
		d := o.Taken.Sub(o.Since)
		total += d
		for _, r := range o.Rows {
			for _, s := range r.By {
				key := loss{r.Container, s.Culprit, s.Cause}
				x := sums[key]
				if x == nil {
					x = &sum{Share: Share{Other: s.Culprit, Cause: s.Cause}}
					sums[key] = x
				}
				x.Name, x.victim = s.Name, r.Name
				x.Mean += s.Slowed * d.Seconds()
				if i == last-1 {
					x.Now += s.Slowed
				}
			}
		}
	}
	by, of = make(map[api.ID][]Share), make(map[api.ID][]Share)
	for key, x := range sums {
		x.Mean /= max(total.Seconds(), 1e-9)
		by[key.victim] = append(by[key.victim], x.Share)
		x.Other, x.Name = key.victim, x.victim
		of[key.culprit] = append(of[key.culprit], x.Share)
	}
	for _, lists := range []map[api.ID][]Share{by, of} {
		for _, list := range lists {
			slices.SortFunc(list, func(a, b Share) int {
				return cmp.Or(cmp.Compare(b.Mean, a.Mean), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Other, b.Other), cmp.Compare(a.Cause, b.Cause))
			})
		}
	}
	return by, of
}

// Every is the interval between frames of a live view.
const Every = 2 * time.Second

// Source provides the frames of a view: an agent, or a recording ([record.Reader]).
type Source interface {
	// Frames yields the frames recorded from one time to another, inclusive, in their order. It
	// skips frames that follow another by less than every. A zero time is no bound. It yields
	// nothing where no frames were recorded or may be read.
	Frames(ctx context.Context, from, to time.Time, every time.Duration) iter.Seq2[api.Frame, error]
	// Span returns the times of the first and the last recorded frame; zero without frames.
	Span() (first, last time.Time)
}

// Live is the Source of a running agent, such as an [Agent].
type Live interface {
	Source
	// Next returns the newest frame.
	Next(ctx context.Context) (api.Frame, error)
}

// Agent is a running agent, with its recording.
type Agent struct {
	*record.Reader // the agent's recording, possibly still being written; nil: none, or not readable
	Client         *api.Client
}

// Next queries the agent at once.
func (a *Agent) Next(ctx context.Context) (api.Frame, error) { return a.Client.Frame(ctx) }
