package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// tenant is one of the three containers of MIST's figure 8, or a second container with a reservation.
type tenant struct {
	name  string
	board *load.Board
	alone api.BlockIOFigures // its throughput beside the others without reservations
}

// threeLoads are the loads of figure 8: sequential with 10 % reads of 64 KiB, sequential
// with 75 % reads of 4 or 32 KiB, and random with 50 % reads of 8 KiB.
func threeLoads() [][]string {
	return [][]string{
		{"disk", "--conns", "4", "--size", "65536", "--sequential", "all", "--writes", "90"},
		{"disk", "--conns", "4", "--size", "4096", "--also", "32768", "--sequential", "all", "--writes", "25"},
		{"disk", "--conns", "4", "--size", "8192", "--writes", "50"},
	}
}

// The steps of figure 8: the reservation of each tenant, as a fraction of its throughput beside the
// others without reservations; 0: none. settled is the longest time until a change takes effect.
func blockioSteps() [][3]float64 {
	return [][3]float64{{1.3, 0, 0}, {0.4, 1.3, 0}, {0, 0.5, 1.3}, {0.6, 0.6, 0.6}}
}

const (
	blockioSettled = 3 * time.Second
	blockioSamples = 3 // one-second samples in a step, after settled
)

// three is one round of figure 8. Off is the part of the same reservations that is met without
// protection.
func (r *blockioRig) three(ctx context.Context, c blockioCase) error {
	before := r.readings()
	b, err := r.guard.client.BlockIO(ctx, "", 3*time.Second)
	if err != nil {
		return err
	}
	now := r.readings()
	for i, t := range r.tenants {
		for _, row := range b.Rows {
			if row.Name == t.name && "/dev/"+row.Disk == r.device {
				t.alone = row.Achieved
			}
		}
		if t.alone == (api.BlockIOFigures{}) || now[i].Since(before[i]).Ops == 0 {
			return fmt.Errorf("%s does nothing", t.name)
		}
	}
	if err := r.capacityOfThree(ctx); err != nil {
		return err
	}
	var met, count, metOff float64
	var slowest time.Duration
	for _, step := range blockioSteps() {
		if err := r.change(ctx, step); err != nil {
			return err
		}
		settled, ok := r.settles(ctx, step)
		slowest = max(slowest, settled)
		met += ok
		for _, part := range step {
			if part > 0 {
				count += blockioSamples
				if part <= 1 {
					metOff += blockioSamples
				}
			}
		}
	}
	r.add(c.name, armOff, figure{MetShare, "1", metOff / count})
	r.add(c.name, armOn, figure{MetShare, "1", met / count}, figure{SettledIn, "s", slowest.Seconds()})

	// The agent must refuse a reservation beyond the capacity that is left.
	refused := 0.0
	err = r.change(ctx, [3]float64{0.6, 0.6, 3})
	if a := (*api.Error)(nil); errors.As(err, &a) && a.Status == http.StatusConflict {
		refused, err = 1, nil
	}
	r.add(c.name, armOn, figure{Refused, "1", refused})
	return errors.Join(err, r.change(ctx, [3]float64{}))
}

func (r *blockioRig) readings() (all []load.Reading) {
	for _, t := range r.tenants {
		all = append(all, t.board.Read())
	}
	return all
}

// capacityOfThree sets the disk's capacity to the sum of the three loads, in terms of the
// cost model: the rates of requests of 4 KiB, and of bytes.
func (r *blockioRig) capacityOfThree(ctx context.Context) error {
	var ops, bytes float64
	for _, t := range r.tenants {
		ops += float64(t.alone.ReadIOPS + t.alone.WriteIOPS)
		bytes += float64(t.alone.ReadBytes + t.alone.WriteBytes)
	}
	// The cost has a part for each request and a part for its bytes, each half of the sum.
	const small = 4096
	base, perByte := 0.5/ops, 0.5/bytes
	most, mostBytes := uint64(1/(base+small*perByte)), uint64(1/perByte)
	f := api.BlockIOFigures{ReadIOPS: most, WriteIOPS: most, ReadBytes: max(mostBytes, most*small), WriteBytes: max(mostBytes, most*small)}
	_, err := r.guard.client.SetCapacity(ctx, api.CapacityRequest{Device: r.device, BlockIOFigures: f, Headroom: 0.05})
	return err
}

func scaled(f api.BlockIOFigures, by float64) api.BlockIOFigures {
	part := func(n uint64) uint64 { return uint64(float64(n) * by) }
	return api.BlockIOFigures{ReadIOPS: part(f.ReadIOPS), WriteIOPS: part(f.WriteIOPS), ReadBytes: part(f.ReadBytes), WriteBytes: part(f.WriteBytes)}
}

// change sets the reservations of the three. It first ends reservations, and grows reservations
// last, so that the sum never exceeds the capacity.
func (r *blockioRig) change(ctx context.Context, parts [3]float64) error {
	list, err := r.guard.client.Reservations(ctx)
	if err != nil {
		return err
	}
	ids := make(map[string]api.Reservation)
	for _, x := range list.Reservations {
		ids[x.Name] = x
	}
	for _, grow := range []bool{false, true} {
		for i, t := range r.tenants {
			f := scaled(t.alone, parts[i])
			x, had := ids[t.name]
			grows := f.ReadIOPS+f.WriteIOPS > x.Reserved.ReadIOPS+x.Reserved.WriteIOPS
			switch {
			case grows != grow || !had && parts[i] == 0:
			case parts[i] == 0:
				_, err = r.guard.client.DeleteReservation(ctx, x.ID)
			case had:
				_, err = r.guard.client.ChangeReservation(ctx, x.ID, f)
			default:
				_, err = r.guard.client.Reserve(ctx, api.ReservationRequest{Container: t.name, Device: r.device, BlockIOFigures: f})
			}
			if err != nil {
				return fmt.Errorf("reserve for %s: %w", t.name, err)
			}
		}
	}
	return nil
}

// settles measures one step: the time until all reservations are met, and how many
// one-second samples after settled meet theirs.
func (r *blockioRig) settles(ctx context.Context, parts [3]float64) (settled time.Duration, met float64) {
	start := time.Now()
	settled = -1
	meets := func(before, now []load.Reading) (n float64, all bool) {
		all = true
		for i, t := range r.tenants {
			if parts[i] == 0 {
				continue
			}
			if due := parts[i] * float64(t.alone.ReadIOPS+t.alone.WriteIOPS); now[i].Since(before[i]).Rate() >= 0.95*due {
				n++
			} else {
				all = false
			}
		}
		return n, all
	}
	for ctx.Err() == nil && time.Since(start) < blockioSettled {
		before := r.readings()
		sleep(ctx, 2*blockioPoll)
		if _, all := meets(before, r.readings()); !all {
			settled = -1
		} else if settled < 0 {
			settled = time.Since(start)
		}
	}
	end := time.Duration(math.MaxInt64)
	for range blockioSamples {
		before := r.readings()
		sleep(ctx, time.Second)
		n, all := meets(before, r.readings())
		if met += n; all {
			end = min(end, time.Since(start))
		}
	}
	if settled < 0 {
		settled = min(end, blockioPatience) // only now, or never
	}
	return settled, met
}

// streamBridge is the node's bridge between the sending and the receiving containers.
const streamBridge = "blockio-br"

// startStreams has each second of some containers send bytes at full speed to the one before it, over
// a bridge of the node.
func (r *blockioRig) startStreams(ctx context.Context, boxes []*sandbox.Box) error {
	if len(boxes) == 0 {
		return nil
	}
	if err := r.rig.Node.Bridge(streamBridge, netip.Prefix{}); err != nil {
		return err
	}
	for i, box := range boxes {
		addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 91, 0, byte(i + 1)}) }
		if err := sandbox.Wire(
			sandbox.End{Box: r.rig.Node, Name: fmt.Sprintf("veth-%d", i), Bridge: streamBridge},
			sandbox.End{Box: box, Name: "eth0", Addr: netip.PrefixFrom(addr(i), 24)},
		); err != nil {
			return err
		}
		load := []string{"udp-recv", "--listen", addr(i).String() + ":9000"}
		if i%2 == 1 {
			load = []string{"udp-send", "--size", "1400", "--to", addr(i-1).String() + ":9000"}
		}
		if err := r.startFrozen(ctx, &r.burners, box, load...); err != nil {
			return err
		}
	}
	return nil
}

const (
	lossOf    = 0.1             // a load that loses this fraction of its IOPS is interfered with
	declareIn = 2 * time.Second // time limit for a declaration
)

// circumstance is one condition for the detector: how it begins, and how it ends.
type circumstance struct {
	name       string
	burners    int
	begin, end func() error
	calm       bool // no interference, whoever else computes
}

func nothing() error { return nil }

// circumstances returns the interference: up to two burners for each CPU, and all burners, because
// a load with one thread notices more of those. It also returns conditions without interference: no
// burner, a paused load, a load with a quota, alone and beside all burners, one with a small
// real-time budget beside them, and a load that competes with its own threads.
func (r *blockioRig) circumstances(ctx context.Context) (all []circumstance) {
	beside := func(n int) circumstance {
		return circumstance{name: fmt.Sprintf("%d burners", n), burners: n, begin: nothing, end: nothing, calm: n == 0}
	}
	for n := range 2*runtime.NumCPU() + 1 {
		all = append(all, beside(n))
	}
	all = append(all, beside(len(r.burners)))
	const period = 100 * time.Millisecond
	limit := func() error { return r.db.Limit(sandbox.CPU{Quota: period / 20, Period: period}) }
	unlimit := func() error { return r.db.Limit(sandbox.CPU{Quota: -1}) }
	set := func(ctx context.Context, in api.SetRequest) error {
		_, err := r.guard.client.Set(ctx, r.db.Name, in)
		return err
	}
	const realtime, help = "fairlead.io.realtime", "fairlead.io.help"
	return append(all,
		circumstance{"idle", len(r.burners), func() error { r.board.SetRate(0); return nil }, func() error { r.board.SetRate(load.Flood); return nil }, true},
		circumstance{"quota", 0, limit, unlimit, true},
		circumstance{"quota beside burners", len(r.burners), limit, unlimit, true},
		circumstance{"own real-time budget", len(r.burners),
			func() error {
				return set(ctx, api.SetRequest{Set: map[string]string{realtime: "20ms", help: "realtime"}})
			},
			func() error {
				return set(context.WithoutCancel(ctx), api.SetRequest{Unset: []string{realtime, help}})
			}, true},
		circumstance{"own threads", 0,
			func() error { return signalAll(r.own, unix.SIGCONT) },
			func() error { return signalAll(r.own, unix.SIGSTOP) }, true},
	)
}

// detect is one round: each circumstance, between two windows without it. The reservation is the
// throughput in the first window, because the speed of a disk changes from minute to minute. A loss
// against the slower of the two windows is due to the circumstance. The agent only observes.
func (r *blockioRig) detect(ctx context.Context, c blockioCase) error {
	row, err := r.achieved(ctx, r.db.Name, r.take/2)
	if err != nil {
		return err
	}
	reserved, err := r.guard.client.Reserve(ctx, api.ReservationRequest{Container: r.db.Name, Device: r.device, BlockIOFigures: row.Achieved})
	if err != nil {
		return err
	}
	defer r.guard.client.DeleteReservation(context.WithoutCancel(ctx), reserved.ID)
	var worst, hits, losses, alarms, calm float64
	var named, right int
	for _, x := range r.circumstances(ctx) {
		s, err := r.sample(ctx, reserved.ID, x)
		if err != nil {
			return fmt.Errorf("%s: %w", x.name, err)
		}
		switch {
		case x.calm:
			calm++
			if s.declared <= declareIn.Seconds() || s.named > 0 {
				alarms++
			}
		case s.part <= 1-lossOf:
			losses++
			if s.declared <= declareIn.Seconds() {
				hits++
			}
			worst = max(worst, min(s.declared, blockioPatience.Seconds()))
			named, right = named+s.named, right+s.right
		}
		if x.name != "idle" {
			r.add(c.name, armOff, figure{PartOfIOPS + ": " + x.name, "1", s.part})
		}
	}
	if losses > 0 {
		r.add(c.name, armOn, figure{Hits, "1", hits / losses}, figure{DetectedIn, "s", worst})
	}
	if named > 0 {
		r.add(c.name, armOn, figure{NamedRight, "1", float64(right) / float64(named)})
	}
	r.add(c.name, armOn, figure{FalseAlarms, "1", alarms / calm})
	return nil
}

// found is the result of one circumstance.
type found struct {
	part         float64 // IOPS, as a fraction of those before or after, whichever are fewer
	declared     float64 // seconds after the begin; infinite if never
	named, right int
}

func (r *blockioRig) sample(ctx context.Context, reservation string, x circumstance) (s found, err error) {
	sleep(ctx, blockioSettle)
	alone, due, err := r.undisturbed(ctx, declareIn/2)
	if err != nil {
		return s, err
	}
	if _, err := r.guard.client.ChangeReservation(ctx, reservation, due); err != nil {
		return s, err
	}
	sleep(ctx, declareIn/2+blockioSettle) // the agent judges by this window, and earlier declarations are over
	beside, err := r.during(ctx, x, &s)
	if err != nil {
		return s, err
	}
	sleep(ctx, blockioSettle)
	after, err := r.window(ctx, declareIn/2)
	s.part = beside.rate / min(alone.rate, after.rate)
	return s, err
}

// during measures the load under a circumstance, and finds the time of the agent's declaration.
func (r *blockioRig) during(ctx context.Context, x circumstance, s *found) (beside work, err error) {
	start := time.Now()
	defer func() { err = errors.Join(err, x.end(), letRun(r.burners, 0)) }()
	if err := errors.Join(x.begin(), letRun(r.burners, x.burners)); err != nil {
		return beside, err
	}
	sleep(ctx, blockioSettle) // at first the scheduler favours a load that slept
	if beside, err = r.window(ctx, max(r.take, declareIn/2)); err != nil {
		return beside, err
	}
	for s.declared = math.Inf(1); ; {
		if s.declared, s.named, s.right, err = r.declared(ctx, start); err != nil || s.named > 0 || time.Since(start) > declareIn+blockioSettle {
			return beside, err
		}
		sleep(ctx, blockioPoll)
	}
}
