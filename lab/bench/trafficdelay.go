package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// The parts of a request's latency: its wait in the queue of the NIC, and the latency of
// the same request without any queue, at the same time on the same CPUs.
const (
	QueueP99  = "wait at the queue p99"
	QueueP999 = "wait at the queue p99.9"
	QueueMax  = "wait at the queue max"
	AsideP99  = "latency aside p99"
	AsideP999 = "latency aside p99.9"
)

// requestSize is the payload of a request, in bytes.
const requestSize = 64

// requestFrame is the length of a request's frame at the NIC.
func requestFrame(p rig.Path) int {
	const ethernet, ipv4, udp, vxlan = 14, 20, 8, 8
	n := ethernet + ipv4 + udp + requestSize
	if p == rig.VXLAN {
		n += ethernet + ipv4 + udp + vxlan
	}
	return n
}

// delays measures where the time of the requests of a case goes.
type delays struct {
	queue *rig.Queue
	box   *sandbox.Box // where aside runs
	aside flow
}

// newDelays starts the measurement, with the load aside paused.
func newDelays(ctx context.Context, r *rig.Rig) (_ *delays, err error) {
	d := &delays{aside: flow{sending: requests("aside")}}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	var at func(port int) string
	d.box, at, err = r.Aside()
	if err != nil {
		return nil, err
	}
	if d.queue, err = r.Queue(requestFrame(r.Path)); err != nil {
		return nil, err
	}
	const port = 9100
	if d.aside.to, err = r.Start(ctx, r.Outside, "rr-server", "--proto", "udp", "--listen", fmt.Sprintf(":%d", port)); err != nil {
		return nil, err
	}
	if d.aside.from, err = r.Start(ctx, d.box, append(d.aside.args, "--to", at(port), "--rate", "0")...); err != nil {
		return nil, err
	}
	return d, nil
}

func (d *delays) close() error {
	errs := []error{d.aside.stop()}
	if d.queue != nil {
		errs = append(errs, d.queue.Close())
	}
	if d.box != nil {
		errs = append(errs, d.box.Destroy())
	}
	return errors.Join(errs...)
}

// delayReading holds the counters of delays at one moment.
type delayReading struct {
	queue  *hist.Histogram
	missed uint64
	aside  load.Reading
}

func (d *delays) read() (delayReading, error) {
	h, missed, err := d.queue.Read()
	return delayReading{h, missed, d.aside.from.Read()}, err
}

// figures returns the figures between two readings.
func (r delayReading) figures(earlier delayReading) ([]figure, error) {
	q, w := r.queue.Since(earlier.queue), r.aside.Since(earlier.aside)
	if missed := r.missed - earlier.missed; missed > q.Count()/1000 {
		return nil, fmt.Errorf("the queue's delay of %d requests was not measured, of %d it was", missed, q.Count())
	}
	waited := func(at float64) float64 {
		if q.Count() == 0 { // no request has left the queue
			return w.Seconds
		}
		return q.Quantile(at).Seconds()
	}
	return []figure{
		{QueueP99, "s", waited(0.99)}, {QueueP999, "s", waited(0.999)}, {QueueMax, "s", waited(1)},
		{AsideP99, "s", w.Latency(0.99).Seconds()}, {AsideP999, "s", w.Latency(0.999).Seconds()},
	}, nil
}
