package api

import (
	"cmp"
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// BlockIOFigures are operations and bytes per second, by direction. 0 is none.
type BlockIOFigures struct {
	ReadIOPS   uint64 `json:"read_iops,omitempty" doc:"reads per second"`
	WriteIOPS  uint64 `json:"write_iops,omitempty" doc:"writes per second"`
	ReadBytes  uint64 `json:"read_bytes_per_second,omitempty" doc:"bytes read per second"`
	WriteBytes uint64 `json:"write_bytes_per_second,omitempty" doc:"bytes written per second"`
}

// ReservationRequest is the body of a request for a reservation.
type ReservationRequest struct {
	Container string `json:"container" doc:"name or runtime id of the container, or id:NUMBER"`
	Device    string `json:"device" doc:"path below /dev"`
	Replace   bool   `json:"replace,omitempty" doc:"take the place of what the container has reserved of that disk; absent: that is refused"`
	BlockIOFigures
}

// CapacityRequest sets the capacity of a device.
type CapacityRequest struct {
	Device   string  `json:"device" doc:"path below /dev"`
	Headroom float64 `json:"headroom,omitempty" doc:"fraction of the capacity that cannot be reserved, 0 to 0.9; absent: 0.1"`
	Measured bool    `json:"measured,omitempty" doc:"the figures were measured, not given by an operator"`
	BlockIOFigures

	Depth1  BlockIOFigures `json:"depth_1,omitzero" doc:"operations per second with one request at a time; absent: not known"`
	Depth   int            `json:"depth,omitempty" doc:"requests at once with which the figures of operations were measured"`
	Seconds float64        `json:"seconds,omitempty" doc:"time for which each figure was measured"`

	Realtime []RealtimePoint `json:"realtime,omitempty" doc:"profile of operations against real-time budgets; absent: the one that is known stays"`
}

// RealtimePoint is the performance of a disk for real-time threads of a budget, one for each CPU,
// while the CPUs are busy.
type RealtimePoint struct {
	Budget    float64 `json:"budget_seconds" doc:"time in each second of each CPU"`
	ReadIOPS  uint64  `json:"read_iops" doc:"reads of 4 KiB per second"`
	WriteIOPS uint64  `json:"write_iops" doc:"writes of 4 KiB per second"`
}

// Reservation is the block I/O that a container has reserved on a device.
type Reservation struct {
	ID        string         `json:"id" doc:"id of the container and number of the disk; does not change while the container runs"`
	Container ID             `json:"container,string" doc:"id of the container"`
	Name      string         `json:"name,omitempty" doc:"name of the container"`
	Device    string         `json:"device" doc:"the device, as written in the request or the policy"`
	Reserved  BlockIOFigures `json:"reserved" doc:"reserved I/O"`
	Share     float64        `json:"share" doc:"reserved fraction of the disk's capacity; 0 if that is not known"`
	Admission string         `json:"admission" doc:"verified (the capacity of the disk has room for it), seen (the capacity is not known, but the disk has done as much at once as is reserved of it), unverified (nobody knows whether the disk can do that), or exceeded (the capacity was found to be less than what is reserved)"`
	Advice    string         `json:"advice,omitempty" doc:"what is known of the disk, how to verify the reservation, and how many requests at once it takes"`
	CPU       float64        `json:"cpu,omitempty" doc:"CPU time that the reservation takes in each second, by what the container used for the I/O of the last second that was measured; 0: it did nothing"`
	From      string         `json:"from" doc:"origin: label, request of (resources), path of a policy file, or set by (who, and when)"`
	Achieved  BlockIOFigures `json:"achieved" doc:"I/O in the last second that was measured"`
	State     string         `json:"state" doc:"idle, met, asks less (than it has reserved), short (less I/O than it asks for, without interference), throttled (by the container's own limits), stolen (by the hypervisor), interference, or lost (the disk has gone)"`

	Evidence string `json:"evidence,omitempty" doc:"figures that show the state, of a reservation that is missed"`
	Mend     string `json:"mend,omitempty" doc:"what would have a reservation met that is missed, or what is done about it"`
}

// Reservations lists all reservations.
type Reservations struct {
	Reservations []Reservation `json:"reservations" doc:"by name of the container and device"`
}

// ReservationChange is the Body of an [Ask] for the policy that makes a change of a reservation.
// The feature answers with a SetRequest. The change is Delete, or the new Figures.
type ReservationChange struct {
	ID      string // of the reservation to change; "": make a new one
	Device  string // of a new reservation
	Replace bool   // a new reservation takes the place of the container's other of that disk
	Figures BlockIOFigures
	Delete  bool
}

// BlockIO is the block I/O of containers.
type BlockIO struct {
	Taken        time.Time       `json:"taken" doc:"when it was measured"`
	Seconds      float64         `json:"seconds" doc:"length of the measurement that ended at taken; 0: there was none, because nothing is reserved and the request had no over"`
	Rows         []BlockIORow    `json:"rows" doc:"one element for each container and disk with I/O or a reservation"`
	Waits        []BlockIOWait   `json:"waits" doc:"time that containers with a reservation waited for a CPU, by the container that ran there; the longest first"`
	Devices      []BlockIODevice `json:"devices" doc:"the disks with a reservation or I/O"`
	Events       []BlockIOEvent  `json:"events" doc:"starts and ends of interference, and actions of the agent; the latest last"`
	Reservations []Reservation   `json:"reservations" doc:"all reservations"`

	Stolen     float64             `json:"stolen" doc:"CPU time that the hypervisor took from this machine, in seconds per second, summed over the CPUs"`
	Interrupts []BlockIOInterrupts `json:"interrupts,omitempty" doc:"interrupts of the CPUs by source; only with over, and for all containers"`
	Threads    []BlockIOThread     `json:"threads,omitempty" doc:"context switches by thread of one container, the most first, at most 1000 threads; only with over"`

	Realtime []BlockIORealtime `json:"realtime,omitempty" doc:"the containers whose threads have a real-time budget (io.help)"`

	Lost uint64 `json:"lost" doc:"requests and waits that are missing in all figures because a table was full"`
}

// BlockIORow is the I/O of one container on one disk.
type BlockIORow struct {
	Container ID              `json:"container,omitempty,string" doc:"id of the container; absent for I/O of no container: that of the host, and buffered writes that the kernel does not attribute"`
	Name      string          `json:"name,omitempty" doc:"name of the container"`
	Disk      string          `json:"disk" doc:"name of the disk, such as vda"`
	Achieved  BlockIOFigures  `json:"achieved" doc:"I/O that was done"`
	Reserved  *BlockIOFigures `json:"reserved,omitempty" doc:"reserved I/O; absent without a reservation"`
	Errors    uint64          `json:"errors,omitempty" doc:"requests that failed"`
	QueueP50  float64         `json:"queue_p50_seconds" doc:"median wait of the requests before they were issued to the device; all quantiles are exact to 1/8 of their value"`
	QueueP99  float64         `json:"queue_p99_seconds" doc:"99th percentile of that wait"`
	DeviceP50 float64         `json:"device_p50_seconds" doc:"median service time of the requests at the device"`
	DeviceP99 float64         `json:"device_p99_seconds" doc:"99th percentile of the service time"`

	State    string    `json:"state" doc:"state of the reservation; best effort without one"`
	Evidence string    `json:"evidence,omitempty" doc:"figures that show the state, of a reservation that is missed; the reason of an action"`
	Mend     string    `json:"mend,omitempty" doc:"what would have a reservation met that is missed, or what is done about it"`
	Culprit  ID        `json:"culprit,omitempty,string" doc:"id of the container that interferes"`
	By       string    `json:"by,omitempty" doc:"name of that container"`
	Action   string    `json:"action,omitempty" doc:"what the agent does to this container in favour of others"`
	Since    time.Time `json:"since,omitzero" doc:"start of the state or the action"`

	Voluntary   uint64  `json:"voluntary_switches,omitempty" doc:"context switches of tasks that blocked or slept"`
	Involuntary uint64  `json:"involuntary_switches,omitempty" doc:"context switches of tasks that were preempted"`
	ICPU        float64 `json:"i_cpu,omitempty" doc:"I_cpu of the MIST paper: involuntary by voluntary context switches; absent below 50 switches per second"`
	ICPUForeign float64 `json:"i_cpu_foreign,omitempty" doc:"part of i_cpu where another container ran next"`
	ICPUOwn     float64 `json:"i_cpu_own,omitempty" doc:"part of i_cpu where another thread of the container ran next"`
	WaitP99     float64 `json:"runqueue_p99_seconds,omitempty" doc:"99th percentile of its tasks' wait for a CPU"`
	WaitForeign float64 `json:"runqueue_foreign,omitempty" doc:"time that its tasks waited for a CPU on which others ran, in seconds per second, summed over the tasks"`
	CPUPressure float64 `json:"cpu_pressure,omitempty" doc:"fraction of the time in which some of its tasks waited for a CPU, including waits for its own quota and its own threads (cpu.pressure, some)"`
	IOPressure  float64 `json:"io_pressure,omitempty" doc:"fraction of the time in which some of its tasks waited for I/O (io.pressure, some)"`
	Throttled   float64 `json:"throttled,omitempty" doc:"time that its own quota, or one of a cgroup above it, throttled it, in seconds per second, summed over the CPUs"`
}

// BlockIORealtime is the state of a container's real-time budget.
type BlockIORealtime struct {
	Container ID      `json:"container,string" doc:"id of the container"`
	Name      string  `json:"name,omitempty" doc:"name of the container"`
	Budget    float64 `json:"budget_seconds" doc:"time in each second of each CPU in which its threads run before ordinary ones"`
	Auto      bool    `json:"auto,omitempty" doc:"the budget is taken from the profile of the disk"`
	Way       string  `json:"way" doc:"how the budget is kept: groups (a real-time group of cgroup v1, SCHED_RR), or deadline (SCHED_DEADLINE of each thread)"`
	Promoted  int     `json:"promoted" doc:"threads that have a part of the budget"`
	Others    int     `json:"others,omitempty" doc:"threads that are ordinary: they are new, refused by the kernel, or more than are looked at"`
	Own       int     `json:"own,omitempty" doc:"threads that are real-time by their own doing, which counts against no budget (only with way deadline)"`
	Refused   string  `json:"refused,omitempty" doc:"why the kernel left a thread ordinary"`
}

// BlockIOInterrupts counts the interrupts of each CPU by one source.
type BlockIOInterrupts struct {
	Source string    `json:"source" doc:"name in /proc/interrupts, for a device the name of the device; for softirqs BLOCK, NET_RX and so on"`
	Soft   bool      `json:"soft,omitempty" doc:"the source is a softirq"`
	Number int       `json:"number,omitempty" doc:"interrupt number, for a device"`
	CPUs   []float64 `json:"cpus" doc:"interrupts per second, for each CPU that is online"`
}

// BlockIOThread counts the context switches of a thread of a container.
type BlockIOThread struct {
	TID         int    `json:"tid" doc:"id of the thread"`
	Voluntary   uint64 `json:"voluntary_switches" doc:"switches because the thread blocked or slept"`
	Involuntary uint64 `json:"involuntary_switches" doc:"switches because the thread was preempted"`
}

// BlockIOWait is the time that tasks of one container waited while another ran on their CPU.
type BlockIOWait struct {
	Victim  ID      `json:"victim,string" doc:"id of the container that waited"`
	Culprit ID      `json:"culprit,omitempty,string" doc:"id of the container that ran; absent for the host, or if it was none"`
	Name    string  `json:"name" doc:"name of the container that ran; (CPU quota), (real-time budget) or (hypervisor) if these were in the way whoever ran"`
	Share   float64 `json:"share" doc:"waiting time in seconds per second, summed over the tasks"`
}

// BlockIODevice is a disk.
type BlockIODevice struct {
	Disk      string         `json:"disk" doc:"name of the disk"`
	Number    string         `json:"number" doc:"device number, such as 254:0"`
	Model     string         `json:"model,omitempty" doc:"model and serial number, as far as the disk reports them"`
	Scheduler string         `json:"scheduler" doc:"I/O scheduler"`
	Capacity  BlockIOFigures `json:"capacity" doc:"capacity of the disk: the most that it does with many requests at once; without figures if it is unknown, and then reservations are unverified"`
	Depth1    BlockIOFigures `json:"depth_1" doc:"operations per second with one request at a time; without figures if unknown"`
	Basis     string         `json:"basis" doc:"what the figures are: which load was measured, and when"`
	Seen      BlockIOFigures `json:"seen" doc:"the most of each that all containers and the host together have done within a second while somebody measured"`
	Headroom  float64        `json:"headroom" doc:"fraction of the capacity that cannot be reserved"`
	Measured  bool           `json:"measured,omitempty" doc:"the capacity was measured"`
	Reserved  float64        `json:"reserved" doc:"reserved fraction of the capacity"`

	Realtime []RealtimePoint `json:"realtime,omitempty" doc:"profile of operations against real-time budgets, from which io.realtime: auto takes a budget"`

	Support string `json:"support" doc:"what the agent can do about containers that interfere on this disk"`
}

// BlockIOEvent is an event of a reservation.
type BlockIOEvent struct {
	ID      uint64    `json:"id" doc:"number of the event; each agent counts from 1"`
	Time    time.Time `json:"time" doc:"time of the event"`
	Victim  ID        `json:"victim,string" doc:"id of the container with the reservation"`
	Name    string    `json:"name,omitempty" doc:"name of that container"`
	Disk    string    `json:"disk" doc:"name of the disk"`
	What    string    `json:"what" doc:"interference, action, release or over"`
	Culprit ID        `json:"culprit,omitempty,string" doc:"id of the container that interferes"`
	Text    string    `json:"text" doc:"evidence of the interference, or the action of the agent"`
}

// BlockIOEventsAfter is the Body of an [Ask] for the events after an id. The feature waits for the
// first of them, or until the context ends. It answers with a []BlockIOEvent.
type BlockIOEventsAfter uint64

// FollowBlockIO yields the events of reservations after the one with the given id; 0: all that the
// agent still has. It ends with ctx or with the agent, and yields an error last. It calls missed,
// if that is not nil, with the number of events that the agent no longer has.
func (c *Client) FollowBlockIO(ctx context.Context, after uint64, missed func(events uint64)) iter.Seq2[BlockIOEvent, error] {
	return func(yield func(BlockIOEvent, error) bool) {
		more := true
		err := c.follow(ctx, "/v1/blockio/events", after, func(name string, data []byte) bool {
			var e BlockIOEvent
			var err error
			switch {
			case name == "":
				err = json.Unmarshal(data, &e)
			case name == "missed" && missed != nil:
				var n uint64
				if err = json.Unmarshal(data, &n); err == nil {
					missed(n)
					return true
				}
			case name == "error":
				var f Failure
				if err = json.Unmarshal(data, &f); err == nil {
					err = &f.Error
				}
			default:
				return true
			}
			more = yield(e, err) && err == nil
			return more
		})
		if more && err != nil {
			yield(BlockIOEvent{}, err)
		}
	}
}

// BlockIO returns the block I/O that containers have reserved and achieve: for all if ref is "",
// otherwise for one, named as for Explain. If over is not 0 (at most [MaxOver]), the agent measures
// for that time before it answers.
func (c *Client) BlockIO(ctx context.Context, ref string, over time.Duration) (out BlockIO, err error) {
	return out, c.report(ctx, "blockio", ref, over, &out)
}

// Reservations lists the reservations.
func (c *Client) Reservations(ctx context.Context) (out Reservations, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/reservations", nil, &out)
}

// Reserve reserves block I/O for a container.
func (c *Client) Reserve(ctx context.Context, in ReservationRequest) (out Reservation, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/reservations", in, &out)
}

// ChangeReservation replaces the figures of one reservation.
func (c *Client) ChangeReservation(ctx context.Context, id string, in BlockIOFigures) (out Reservation, err error) {
	return out, c.do(ctx, http.MethodPatch, "/v1/reservations/"+url.PathEscape(id), in, &out)
}

// DeleteReservation deletes a reservation that was made by hand.
func (c *Client) DeleteReservation(ctx context.Context, id string) (out Reservation, err error) {
	return out, c.do(ctx, http.MethodDelete, "/v1/reservations/"+url.PathEscape(id), nil, &out)
}

// SetCapacity sets the capacity of a device.
func (c *Client) SetCapacity(ctx context.Context, in CapacityRequest) (out BlockIODevice, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/capacities", in, &out)
}

// SortBlockIO sorts the lists of b.
func SortBlockIO(b BlockIO) {
	slices.SortFunc(b.Rows, func(x, y BlockIORow) int {
		return cmp.Or(cmp.Compare(x.Disk, y.Disk), strings.Compare(x.Name, y.Name), cmp.Compare(x.Container, y.Container))
	})
	slices.SortFunc(b.Reservations, func(x, y Reservation) int {
		return cmp.Or(strings.Compare(x.Name, y.Name), strings.Compare(x.Device, y.Device), strings.Compare(x.ID, y.ID))
	})
	slices.SortFunc(b.Waits, func(x, y BlockIOWait) int { return cmp.Compare(y.Share, x.Share) })
	slices.SortFunc(b.Devices, func(x, y BlockIODevice) int { return strings.Compare(x.Disk, y.Disk) })
}

// slowed returns a function that fills in how much of its reserved I/O a container lost, and which
// containers ran while it waited for CPUs. Both cover the last window of the report, which may be
// nil.
func (b *BlockIO) slowed() func(*OverviewRow) losses {
	if b == nil {
		return func(*OverviewRow) losses { return nil }
	}
	rows, waits := make(map[ID][]BlockIORow), make(map[ID][]BlockIOWait)
	for _, r := range b.Rows {
		rows[r.Container] = append(rows[r.Container], r)
	}
	for _, w := range b.Waits {
		// A quota or a hypervisor is no neighbour; its name is in brackets.
		if w.Victim != w.Culprit && (w.Culprit != 0 || w.Name == "(host)") {
			waits[w.Victim] = append(waits[w.Victim], w)
		}
	}
	return func(row *OverviewRow) (l losses) {
		name(row, waits[row.Container])
		for _, r := range rows[row.Container] {
			row.IOPS += float64(r.Achieved.ReadIOPS + r.Achieved.WriteIOPS)
			if r.Reserved == nil {
				continue
			}
			row.Reserved += float64(r.Reserved.ReadIOPS + r.Reserved.WriteIOPS)
			if r.State != "interference" {
				continue
			}
			x := Slowdown{Cause: SlowedByDisk, Slowed: r.missing(), Culprit: r.Culprit, Name: r.By}
			if slices.ContainsFunc(waits[row.Container], func(w BlockIOWait) bool { return w.Culprit == r.Culprit && w.Share >= waitedEnough }) {
				x.Cause = SlowedByCPU
			}
			if len(l) == 0 || x.Slowed > l[0].Slowed {
				l = losses{x} // the worst disk counts, as one disk after the other is slowed
			}
		}
		return l
	}
}

// waitedEnough is the time, in seconds per second, for which a container with a reservation waits
// for a CPU that another uses. From there on that container is to blame, and not the disk.
const waitedEnough = 0.05

// name fills in the known containers that ran while a container waited for CPUs.
func name(row *OverviewRow, waits []BlockIOWait) {
	all := 0.0
	for _, w := range waits {
		all += w.Share
	}
	i := slices.IndexFunc(row.By, func(x Slowdown) bool { return x.Cause == SlowedByCPU })
	if i < 0 || all <= 0 {
		return
	}
	loss := row.By[i].Slowed
	row.By = slices.Delete(row.By, i, i+1)
	for _, w := range waits {
		row.By = append(row.By, Slowdown{SlowedByCPU, loss * w.Share / all, w.Culprit, w.Name})
	}
}

// missing returns the largest unachieved part of a reservation's figures.
func (r BlockIORow) missing() (part float64) {
	for _, x := range [][2]uint64{
		{r.Achieved.ReadIOPS, r.Reserved.ReadIOPS}, {r.Achieved.WriteIOPS, r.Reserved.WriteIOPS},
		{r.Achieved.ReadBytes, r.Reserved.ReadBytes}, {r.Achieved.WriteBytes, r.Reserved.WriteBytes},
	} {
		if got, due := x[0], x[1]; due > got {
			part = max(part, 1-float64(got)/float64(due))
		}
	}
	return part
}

// actions lists what is done about disks to or for a container. The report may be nil.
func (b *BlockIO) actions(id ID) (list []Evidence) {
	if b == nil {
		return nil
	}
	for _, r := range b.Rows {
		if r.Container == id && r.Action != "" {
			list = append(list, Evidence{"blockio", r.Since, r.Action + " on " + r.Disk + ": " + r.Evidence})
		}
	}
	for _, e := range b.Events {
		switch id {
		case e.Victim:
			list = append(list, Evidence{"blockio", e.Time, e.What + " on " + e.Disk + ": " + e.Text})
		case e.Culprit:
			list = append(list, Evidence{"blockio", e.Time, e.What + " on " + e.Disk + ", for " + e.Name + ": " + e.Text})
		}
	}
	return list
}
