package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// tenant is one of the three containers of MIST's figure 8.
type tenant struct {
	name  string
	board *load.Board
	alone api.BlockIOFigures // its throughput beside the others without reservations
}

// threeLoads are the loads of figure 8: sequential with 10 % reads of 64 KiB, sequential
// with 75 % reads of 4 or 32 KiB, and random with 50 % reads of 8 KiB.
func threeLoads() [][]string {
	return [][]string{
		{"--size", "65536", "--sequential", "all", "--writes", "90"},
		{"--size", "4096", "--also", "32768", "--sequential", "all", "--writes", "25"},
		{"--size", "8192", "--writes", "50"},
	}
}

func (r *blockioRig) startThree(ctx context.Context) error {
	for i, args := range threeLoads() {
		g, err := r.rig.Start(ctx, r.rig.Boxes[i], append([]string{"disk", "--to", r.target(), "--conns", "4"}, args...)...)
		if err != nil {
			return err
		}
		r.tenants = append(r.tenants, &tenant{name: r.rig.Boxes[i].Name, board: g.Board})
	}
	return nil
}

// The steps of figure 8: the reservation of each tenant, as a fraction of its throughput beside the
// others without reservations; 0 is none. settled is the maximum time for a change to take effect.
func blockioSteps() [][3]float64 {
	return [][3]float64{{1.3, 0, 0}, {0.4, 1.3, 0}, {0, 0.5, 1.3}, {0.6, 0.6, 0.6}}
}

const (
	blockioSettled = 3 * time.Second
	blockioSamples = 3 // one-second samples in a step, after settled
)

// three is one round of figure 8. Off is the part of the same reservations that would have been met
// without protection.
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
		settled, ok, err := r.settles(ctx, step)
		if err != nil {
			return err
		}
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
func (r *blockioRig) settles(ctx context.Context, parts [3]float64) (settled time.Duration, met float64, err error) {
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
	for time.Since(start) < blockioSettled {
		before := r.readings()
		if err := sleep(ctx, 2*blockioPoll); err != nil {
			return 0, 0, err
		}
		if _, all := meets(before, r.readings()); !all {
			settled = -1
		} else if settled < 0 {
			settled = time.Since(start)
		}
	}
	end := time.Duration(math.MaxInt64)
	for range blockioSamples {
		before := r.readings()
		if err := sleep(ctx, time.Second); err != nil {
			return 0, 0, err
		}
		n, all := meets(before, r.readings())
		if met += n; all {
			end = min(end, time.Since(start))
		}
	}
	if settled < 0 {
		settled = min(end, blockioPatience) // only now, or never
	}
	return settled, met, nil
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
