package blockio

import (
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/hist"
)

// Bounds of the buckets in Prometheus' form: 2^12 ns is 4 µs, 2^30 a second.
const firstBucket, lastBucket = 12, 30

// Snapshot implements feature.Feature: what was counted since something is measured.
func (f *BlockIO) Snapshot() feature.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := feature.Snapshot{Taken: time.Now(), Help: help()}
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
			verified := 0.0
			if f.admission(r).How == decide.AdmissionVerified {
				verified = 1
			}
			add(id, "blockio_reservation_verified", r.disk.Name, verified)
			met := 1.0
			if f.standing(id, r).Missed() {
				met = 0
			}
			add(id, "blockio_reservation_met", r.disk.Name, met)
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

func help() map[string]string {
	return map[string]string{
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
}
