package blockio

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/prometheus/procfs"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// Report implements feature.Reporter.
func (f *BlockIO) Report(ctx context.Context, of *container.Container, ask api.Ask) (any, error) {
	if f.Verdict.Level == probe.Unavailable {
		return nil, f.Unavailable()
	}
	f.mu.Lock()
	d, length := f.shown, f.window.Length
	f.mu.Unlock()
	var before, after detail
	if ask.Over > 0 {
		before = f.detailOf(of)
		var err error
		if d, length, err = f.look(ctx, ask.Over); err != nil {
			return nil, err
		}
		after = f.detailOf(of)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	out := f.wire(d, length)
	after.addTo(&out, before, length)
	if of != nil {
		mine := func(id api.ID) bool { return id == api.ID(of.ID) }
		out.Rows = slices.DeleteFunc(out.Rows, func(r api.BlockIORow) bool { return !mine(r.Container) })
		out.Waits = slices.DeleteFunc(out.Waits, func(w api.BlockIOWait) bool { return !mine(w.Victim) })
		out.Events = slices.DeleteFunc(out.Events, func(e api.BlockIOEvent) bool { return !mine(e.Victim) && !mine(e.Culprit) })
		out.Realtime = slices.DeleteFunc(out.Realtime, func(r api.BlockIORealtime) bool { return !mine(r.Container) })
		out.Reservations = slices.DeleteFunc(out.Reservations, func(r api.Reservation) bool { return !mine(r.Container) })
	}
	return out, nil
}

// wire converts a reading of some length to the API's form. The caller holds f.mu.
func (f *BlockIO) wire(d reading, length time.Duration) api.BlockIO {
	out := api.BlockIO{
		Taken: d.Taken, Seconds: length.Seconds(), Rows: []api.BlockIORow{}, Waits: []api.BlockIOWait{}, Devices: []api.BlockIODevice{},
		Events: []api.BlockIOEvent{}, Reservations: []api.Reservation{}, Lost: d.Lost.Accounts + d.Lost.Waits + d.Lost.Pairs + d.Lost.Levels,
	}
	if out.Taken.IsZero() {
		out.Taken = time.Now()
	}
	if length > 0 {
		out.Stolen = d.stolen.Seconds() / length.Seconds()
	}
	accounts := keyed(slices.DeleteFunc(slices.Clone(d.Accounts), func(a monitor.Account) bool { return a.Reads+a.Writes+a.Errors == 0 }), placeOf)
	disks := make(map[decide.Disk]bool)
	for id, m := range f.managed {
		for _, r := range m.reserved {
			at := decide.Place{Container: id, Disk: r.at()}
			a := accounts[at]
			out.Reservations = append(out.Reservations, f.reservation(m, r, achieved(a, length), time.Duration(float64(d.delays[id].used)/max(length.Seconds(), 1e-9))))
			accounts[at] = a // a row even without I/O
		}
	}
	for id, act := range f.actions { // a cap may leave no I/O in so short a time
		for disk := range act.Caps {
			at := decide.Place{Container: id, Disk: disk}
			a := accounts[at]
			accounts[at] = a
		}
	}
	for at, a := range accounts {
		disks[at.Disk] = true
		out.Rows = append(out.Rows, f.row(at, a, d, length))
	}
	for _, w := range d.Waits {
		if w.For <= 0 || d.Detailed <= 0 {
			continue
		}
		wire := api.BlockIOWait{Victim: api.ID(w.Victim), Culprit: api.ID(w.Culprit), Name: f.name(w.Culprit), Share: w.For.Seconds() / d.Detailed.Seconds()}
		if why, is := map[container.ID]string{
			decide.Unseen: "too many to tell", decide.Quota: "(CPU quota)", decide.Realtime: "(real-time budget)", decide.Stolen: "(hypervisor)",
		}[w.Culprit]; is {
			wire.Culprit, wire.Name = 0, why
		}
		out.Waits = append(out.Waits, wire)
	}
	for at := range disks {
		if disk, err := block.Find(f.cfg.Roots.Sys, at.Major, at.Minor); err == nil {
			out.Devices = append(out.Devices, f.device(disk))
		}
	}
	out.Events = append(out.Events, f.named(f.events.kept())...)
	out.Realtime = f.realtimes()
	api.SortBlockIO(out)
	return out
}

func (f *BlockIO) name(id container.ID) string {
	if id == decide.System {
		return "(host)"
	}
	c, _ := f.cfg.Containers.Lookup(id)
	return c.Name
}

// atLeast is the number of context switches per second from which their ratio is significant, as in the
// paper.
const atLeast = 50

func (f *BlockIO) row(at decide.Place, a monitor.Account, d reading, length time.Duration) api.BlockIORow {
	row := api.BlockIORow{
		Container: api.ID(at.Container), Disk: f.diskName(at.Disk), Achieved: achieved(a, length), Errors: a.Errors, State: decide.StateBestEffort,
	}
	if at.Container != decide.System {
		row.Name = f.name(at.Container)
	}
	if a.Queue != nil {
		row.QueueP50, row.QueueP99 = a.Queue.Quantile(0.5).Seconds(), a.Queue.Quantile(0.99).Seconds()
		row.DeviceP50, row.DeviceP99 = a.Device.Quantile(0.5).Seconds(), a.Device.Quantile(0.99).Seconds()
	}
	if m := f.managed[at.Container]; m != nil {
		for _, r := range m.reserved {
			if r.at() == at.Disk {
				s := f.standing(at.Container, r)
				reserved := r.figures
				row.Reserved, row.State, row.Since, row.Evidence, row.Mend = &reserved, s.State, s.Since, s.Evidence, s.Mend
				if s.State == decide.StateContended {
					row.Culprit, row.By = api.ID(s.Culprit), f.name(s.Culprit)
				}
			}
		}
	}
	if act, acts := f.actions[at.Container]; acts {
		row.Action = f.actionText(at.Container, act)
		if !act.None() || row.State == decide.StateBestEffort {
			row.Since, row.Evidence = act.Since, act.Reason
		}
	}
	if length > 0 {
		addContention(&row, at.Container, d, length)
	}
	return row
}

// addContention adds how a watched container competed for the CPUs.
func addContention(row *api.BlockIORow, id container.ID, d reading, length time.Duration) {
	part := func(t, of time.Duration) float64 { return t.Seconds() / max(of, time.Nanosecond).Seconds() }
	for _, s := range d.Switches {
		if s.Container != id {
			continue
		}
		row.Voluntary, row.Involuntary, row.WaitP99 = s.Voluntary, s.Involuntary, s.Wait.Quantile(0.99).Seconds()
		if s.Voluntary > 0 && float64(s.Voluntary+s.Involuntary) >= atLeast*d.Detailed.Seconds() {
			row.ICPU = float64(s.Involuntary) / float64(s.Voluntary)
			row.ICPUForeign = float64(s.Foreign) / float64(s.Voluntary)
			row.ICPUOwn = row.ICPU - row.ICPUForeign
		}
	}
	for _, w := range d.Waits {
		if w.Victim == id && w.Culprit != id && (w.Culprit == decide.System || decide.IsContainer(w.Culprit)) {
			row.WaitForeign += part(w.For, d.Detailed)
		}
	}
	if t, watched := d.delays[id]; watched {
		row.CPUPressure, row.IOPressure = part(t.cpu, length), part(t.io, length)
		for _, quota := range t.throttled {
			row.Throttled += part(quota, length)
		}
	}
}

// reservation describes a reservation, its container's rates, and the CPU time that it takes per
// second.
func (f *BlockIO) reservation(m *managed, r reservation, got api.BlockIOFigures, used time.Duration) api.Reservation {
	id := m.target.Container.ID
	s := f.standing(id, r)
	out := api.Reservation{
		ID: reservationID(id, r), Container: api.ID(id), Name: m.target.Container.Name, Device: r.device, Reserved: r.figures, Achieved: got,
		State: s.State, Evidence: s.Evidence, Mend: s.Mend, From: origin(m.target, reserveKey).From,
	}
	if c := f.capacity(r.disk); c.Known() {
		out.Share, _, _ = c.Share(r.figures)
	}
	out.CPU = decide.Takes(f.capacity(r.disk).OrAssumed(f.reservedOf(r.at())), used, got, r.figures, runtime.NumCPU()).Seconds()
	a := f.admission(r)
	out.Admission, out.Advice = a.How, a.Text
	return out
}

func reservationID(id container.ID, r reservation) string {
	return fmt.Sprintf("%s-%d-%d", id, r.disk.Major, r.disk.Minor)
}

func (f *BlockIO) device(d block.Disk) api.BlockIODevice {
	c := f.capacity(d)
	out := api.BlockIODevice{
		Disk: d.Name, Number: d.Number(), Model: d.Model, Scheduler: d.Scheduler, Capacity: c.BlockIOFigures, Headroom: c.Headroom, Measured: c.Measured,
		Support: "caps", Realtime: c.Realtime,
		Depth1: c.Depth1, Seen: c.Seen, Basis: c.Basis(),
	}
	if by := f.divides(d); by != "" {
		out.Support = "weights by " + by + ", caps"
	}
	for _, h := range f.holders(decide.Disk{Major: d.Major, Minor: d.Minor}, 0) {
		if c.Known() {
			s, _, _ := c.Share(h.Figures)
			out.Reserved += s
		}
	}
	return out
}

// detail holds what only a report over a given time reads: the interrupts for a report on all
// containers, the threads for a report on one.
type detail struct {
	soft, hard []irq.Interrupts
	threads    map[int]api.BlockIOThread
}

// maxThreads bounds the threads that a report reads. A container may have any number of threads.
const maxThreads = 1000

// detailOf reads the details. It omits what it cannot read.
func (f *BlockIO) detailOf(c *container.Container) (d detail) {
	proc := f.cfg.Roots.Proc
	if c == nil {
		d.soft, _ = irq.Softirqs(proc)
		d.hard, _ = irq.IRQs(proc)
		return d
	}
	d.threads = make(map[int]api.BlockIOThread)
	fs, _ := procfs.NewFS(proc)
	tids, _ := cgroup.Threads(c.Cgroup.V2, maxThreads)
	for _, tid := range tids {
		thread, err := fs.Proc(tid) // /proc does not list threads, but opens them
		if err != nil {
			continue
		}
		if s, err := thread.NewStatus(); err == nil {
			d.threads[tid] = api.BlockIOThread{TID: tid, Voluntary: s.VoluntaryCtxtSwitches, Involuntary: s.NonVoluntaryCtxtSwitches}
		}
	}
	return d
}

// addTo adds the difference from an earlier reading to a report.
func (d detail) addTo(out *api.BlockIO, before detail, length time.Duration) {
	out.Interrupts = append(rates(before.hard, d.hard, false, length), rates(before.soft, d.soft, true, length)...)
	for tid, t := range d.threads {
		if b, had := before.threads[tid]; had { // a thread that is new since then counts in full
			t.Voluntary, t.Involuntary = t.Voluntary-min(b.Voluntary, t.Voluntary), t.Involuntary-min(b.Involuntary, t.Involuntary)
		}
		if t.Voluntary+t.Involuntary > 0 {
			out.Threads = append(out.Threads, t)
		}
	}
	slices.SortFunc(out.Threads, func(x, y api.BlockIOThread) int {
		return cmp.Or(cmp.Compare(y.Voluntary+y.Involuntary, x.Voluntary+x.Involuntary), cmp.Compare(x.TID, y.TID))
	})
}

// rates returns the rates of all sources that interrupted a CPU in between. It omits sources whose
// number of CPUs has changed, as their counts are not comparable.
func rates(before, now []irq.Interrupts, soft bool, length time.Duration) (out []api.BlockIOInterrupts) {
	type key struct {
		source string
		number int
	}
	was := keyed(before, func(i irq.Interrupts) key { return key{i.Source, i.Number} })
	for _, n := range now {
		b := was[key{n.Source, n.Number}]
		if len(b.Counts) != len(n.Counts) {
			continue
		}
		wire, any := api.BlockIOInterrupts{Source: n.Source, Soft: soft, Number: max(n.Number, 0), CPUs: make([]float64, len(n.Counts))}, false
		for cpu, count := range n.Counts {
			wire.CPUs[cpu] = float64(count-min(b.Counts[cpu], count)) / length.Seconds()
			any = any || count > b.Counts[cpu]
		}
		if any {
			out = append(out, wire)
		}
	}
	return out
}

// Bounds of the buckets in Prometheus' form: 2^12 ns is 4 µs, 2^30 a second.
const firstBucket, lastBucket = 12, 30

// Snapshot implements feature.Feature. Its counters start when measuring starts.
func (f *BlockIO) Snapshot() feature.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := feature.Snapshot{Taken: time.Now(), Help: help}
	add := func(id container.ID, sample, disk string, v float64, labels ...feature.Label) {
		s.Samples = append(s.Samples, feature.Sample{Container: id, Name: sample, Device: disk, Labels: labels, Value: v})
	}
	way := func(value string) feature.Label { return feature.Label{Name: "direction", Value: value} }
	for _, a := range f.last.Accounts {
		disk := f.diskName(a.Disk)
		for _, x := range []struct {
			way        string
			ios, bytes uint64
		}{{"read", a.Reads, a.ReadBytes}, {"write", a.Writes, a.WriteBytes}} {
			add(a.Container, "blockio_requests_total", disk, float64(x.ios), way(x.way))
			add(a.Container, "blockio_bytes_total", disk, float64(x.bytes), way(x.way))
		}
		add(a.Container, "blockio_errors_total", disk, float64(a.Errors))
		for sample, h := range map[string]*hist.Histogram{"blockio_queue_seconds": a.Queue, "blockio_device_seconds": a.Device} {
			s.Samples = append(s.Samples, feature.Sample{Container: a.Container, Name: sample, Device: disk, Histogram: h.Forms(firstBucket, lastBucket)})
		}
	}
	for _, w := range f.last.Waits {
		if w.Culprit != decide.System && !decide.IsContainer(w.Culprit) {
			continue
		}
		add(w.Victim, "blockio_runqueue_wait_seconds_total", "", w.For.Seconds(), feature.Label{Name: "culprit", Container: w.Culprit})
	}
	for id, m := range f.managed {
		for _, r := range m.reserved {
			if c := f.capacity(r.disk); c.Known() {
				all, _, _ := c.Share(r.figures)
				add(id, "blockio_reserved_share", r.disk.Name, all)
			}
			truth := map[bool]float64{true: 1}
			add(id, "blockio_reservation_verified", r.disk.Name, truth[f.admission(r).How == decide.AdmissionVerified])
			add(id, "blockio_reservation_met", r.disk.Name, truth[!f.standing(id, r).Missed()])
		}
	}
	for id, a := range f.actions {
		if !a.None() {
			add(id, "blockio_held_back", "", 1)
		}
		if a.Help != "" {
			add(id, "blockio_helped", "", 1, feature.Label{Name: "by", Value: string(a.Help)})
		}
	}
	return s
}

// help describes the samples.
var help = map[string]string{
	"blockio_requests_total":              "Requests that a disk has completed, since block I/O is measured.",
	"blockio_bytes_total":                 "Bytes of requests that a disk has completed, since block I/O is measured.",
	"blockio_errors_total":                "Requests that a disk has failed, since block I/O is measured.",
	"blockio_runqueue_wait_seconds_total": "Time for which tasks of a container with a reservation waited for a CPU while those of the culprit ran there.",
	"blockio_reserved_share":              "Part of the disk's capacity that the container has reserved, where that capacity is known.",
	"blockio_reservation_verified":        "Whether the reservation was admitted against a capacity that was measured or given (1), or that is not known (0).",
	"blockio_reservation_met":             "Whether the container gets what it has reserved, or asks for less.",
	"blockio_helped":                      "Whether something is done for the container's own tasks, as its reservation was missed for want of CPU.",
	"blockio_held_back":                   "Whether the container is held back for the sake of a reservation.",
	"blockio_queue_seconds":               "Time of requests from being made to being given to the disk.",
	"blockio_device_seconds":              "Time of requests at the disk.",
}
