package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

func blockioRoutes() []route {
	one := map[string]string{"id": "the id of a reservation"}
	return append(report("blockio", BlockIO{},
		"a time, as 1s, at most 30s: the answer comes after it, and is about it. Without, it is about the last second in which something was measured",
		"Say what block I/O each container has reserved and gets, what is in its way, and what is done about it; with the disks, and the latest events.",
		"The same for one container."),
		route{method: "GET", path: "/v1/blockio/events", out: BlockIOEvent{}, stream: followBlockIO,
			summary: "Follow the events of reservations, as server-sent events: those that are remembered first, or after the header Last-Event-ID. The first event is named state: how many read, and how many were dropped as they read too slowly. One named missed has as data how many events are not remembered any more."},
		route{method: "GET", path: "/v1/reservations", out: Reservations{}, call: listReservations,
			summary: "List the reservations of block I/O, those of policy too, with what is achieved of each."},
		route{method: "POST", path: "/v1/reservations", in: ReservationRequest{}, out: Reservation{}, status: http.StatusCreated, call: reserve,
			summary: "Reserve block I/O of a device for a running container, until it ends. It is refused with what is left, and with who holds the rest, if the device has not as much, or the container has a reservation there."},
		route{method: "GET", path: "/v1/reservations/{id}", params: one, out: Reservation{}, call: oneReservation,
			summary: "Show one reservation."},
		route{method: "PATCH", path: "/v1/reservations/{id}", params: one, in: BlockIOFigures{}, out: Reservation{}, call: changeReservation,
			summary: "Reserve other figures in the place of those of one reservation. What is refused leaves it as it is. One of policy is overruled until that is deleted, or the container ends."},
		route{method: "DELETE", path: "/v1/reservations/{id}", params: one, out: Reservation{}, call: deleteReservation,
			summary: "End one reservation that was made by hand. What policy reserves counts again. The answer is what was reserved."},
		route{method: "POST", path: "/v1/capacities", in: CapacityRequest{}, out: BlockIODevice{}, status: http.StatusCreated, call: setCapacity,
			summary: "Say what a device can do, as measured, or as its operator knows. It is kept in the file --disk-capacities of the agent, also through the next boot; a file that cannot be written is status 503. Reservations that exceed it then stay."},
	)
}

// BlockIOFigures are operations and bytes per second, by direction. 0 is nothing.
type BlockIOFigures struct {
	ReadIOPS   uint64 `json:"read_iops,omitempty" doc:"reads per second"`
	WriteIOPS  uint64 `json:"write_iops,omitempty" doc:"writes per second"`
	ReadBytes  uint64 `json:"read_bytes_per_second,omitempty" doc:"bytes read per second"`
	WriteBytes uint64 `json:"write_bytes_per_second,omitempty" doc:"bytes written per second"`
}

// ReservationRequest is the body of a request to reserve.
type ReservationRequest struct {
	Container string `json:"container" doc:"id, runtime id or name of the container"`
	Device    string `json:"device" doc:"path below /dev"`
	BlockIOFigures
}

// CapacityRequest says what a device can do.
type CapacityRequest struct {
	Device   string  `json:"device" doc:"path below /dev"`
	Headroom float64 `json:"headroom,omitempty" doc:"part of it that is never reserved, 0 to 0.9; absent: 0.1"`
	Measured bool    `json:"measured,omitempty" doc:"the figures were measured, not given"`
	BlockIOFigures
}

// Reservation is what a container has reserved of a device.
type Reservation struct {
	ID        string         `json:"id" doc:"the container's id and the disk's number; the same for as long as the container runs"`
	Container container.ID   `json:"container,string" doc:"id of the container"`
	Name      string         `json:"name,omitempty" doc:"name of the container"`
	Device    string         `json:"device" doc:"the device, as it was named"`
	Reserved  BlockIOFigures `json:"reserved" doc:"what is reserved"`
	Share     float64        `json:"share" doc:"the part of the disk's capacity that this is"`
	From      string         `json:"from" doc:"where it comes from: label, the path of a file, or set by (who, and when)"`
	Achieved  BlockIOFigures `json:"achieved" doc:"what was done over the last second in which something was measured"`
	State     string         `json:"state" doc:"idle, met, short (less is done than reserved, and nobody is in the way), throttled (by the container's own limits), stolen (by the hypervisor), interference, or lost (the disk has gone)"`
}

// Reservations are all reservations.
type Reservations struct {
	Reservations []Reservation `json:"reservations" doc:"by name of the container and device"`
}

// ReservationChange asks the feature how policy has to be set for a change of a
// reservation; the answer is a SetRequest. Delete, or the figures to be reserved.
type ReservationChange struct {
	ID      string // of the one to be changed; "": a new one
	Device  string // of a new one
	Figures BlockIOFigures
	Delete  bool
}

// BlockIO is the block I/O of containers.
type BlockIO struct {
	Taken        time.Time       `json:"taken" doc:"when it was measured"`
	Seconds      float64         `json:"seconds" doc:"for so long before taken; 0: nothing has been measured, as nothing is reserved and nobody asked for a time"`
	Rows         []BlockIORow    `json:"rows" doc:"one element for each container and disk with I/O or a reservation"`
	Waits        []BlockIOWait   `json:"waits" doc:"who waited for a CPU while whom ran there, of those with a reservation; the longest first"`
	Devices      []BlockIODevice `json:"devices" doc:"the disks with a capacity, a reservation or I/O"`
	Events       []BlockIOEvent  `json:"events" doc:"interference that began or ended, and what was done; the latest last"`
	Reservations []Reservation   `json:"reservations" doc:"what is reserved"`

	Stolen     float64             `json:"stolen" doc:"seconds in each second for which the hypervisor let CPUs of this machine wait, added up"`
	Interrupts []BlockIOInterrupts `json:"interrupts,omitempty" doc:"who interrupted the CPUs; only with a time, and for all containers"`
	Threads    []BlockIOThread     `json:"threads,omitempty" doc:"context switches of the threads of one container, those with most of them first, at most 1000; only with a time"`

	Lost uint64 `json:"lost" doc:"requests and waits that found no place in the accounts and are in no figure"`
}

// BlockIORow is the I/O of one container at one disk.
type BlockIORow struct {
	Container container.ID    `json:"container,omitempty,string" doc:"id of the container; absent for what belongs to none: the host, and buffered writes that the kernel does not attribute"`
	Name      string          `json:"name,omitempty" doc:"name of the container"`
	Disk      string          `json:"disk" doc:"name of the disk, as vda"`
	Achieved  BlockIOFigures  `json:"achieved" doc:"what was done"`
	Reserved  *BlockIOFigures `json:"reserved,omitempty" doc:"what is reserved; absent if nothing is"`
	Errors    uint64          `json:"errors,omitempty" doc:"requests that failed"`
	QueueP50  float64         `json:"queue_p50_seconds" doc:"half of the requests waited no longer before they were given to the device; to within 1/8, as the others"`
	QueueP99  float64         `json:"queue_p99_seconds" doc:"99 % of them"`
	DeviceP50 float64         `json:"device_p50_seconds" doc:"half of the requests took the device no longer"`
	DeviceP99 float64         `json:"device_p99_seconds" doc:"99 % of them"`

	State    string       `json:"state" doc:"as of a reservation; best effort without one"`
	Evidence string       `json:"evidence,omitempty" doc:"of interference: what shows it"`
	Culprit  container.ID `json:"culprit,omitempty,string" doc:"of interference: the container that is in the way"`
	By       string       `json:"by,omitempty" doc:"name of the culprit"`
	Action   string       `json:"action,omitempty" doc:"what is done to this container for the sake of others"`
	Since    time.Time    `json:"since,omitzero" doc:"since when the state, or the action, is so"`

	Voluntary   uint64  `json:"voluntary_switches,omitempty" doc:"context switches as it had nothing to do"`
	Involuntary uint64  `json:"involuntary_switches,omitempty" doc:"context switches though it had"`
	ICPU        float64 `json:"i_cpu,omitempty" doc:"I_cpu of the MIST paper: involuntary over voluntary ones; absent below 50 switches a second"`
	ICPUForeign float64 `json:"i_cpu_foreign,omitempty" doc:"the part of i_cpu in favour of others"`
	ICPUOwn     float64 `json:"i_cpu_own,omitempty" doc:"the part of i_cpu in favour of other threads of the container"`
	WaitP99     float64 `json:"runqueue_p99_seconds,omitempty" doc:"99 % of its tasks waited no longer for a CPU"`
	WaitForeign float64 `json:"runqueue_foreign,omitempty" doc:"seconds in each second for which its tasks waited for CPUs on which others ran; several tasks add up"`
	CPUPressure float64 `json:"cpu_pressure,omitempty" doc:"part of the time in which some of its tasks waited for a CPU, its own quota and its own threads included (cpu.pressure, some)"`
	IOPressure  float64 `json:"io_pressure,omitempty" doc:"part of the time in which some of its tasks waited for I/O (io.pressure, some)"`
	Throttled   float64 `json:"throttled,omitempty" doc:"seconds in each second for which its own quota kept it from running; several CPUs add up"`
}

// BlockIOInterrupts is how often one source interrupted each CPU.
type BlockIOInterrupts struct {
	Source string    `json:"source" doc:"as in /proc/interrupts, the device for one of a device; BLOCK, NET_RX and so on of softirqs"`
	Soft   bool      `json:"soft,omitempty" doc:"it is a softirq"`
	Number int       `json:"number,omitempty" doc:"number of a device's interrupt"`
	CPUs   []float64 `json:"cpus" doc:"times per second, for each CPU that is online"`
}

// BlockIOThread is how often a thread of a container gave up its CPU.
type BlockIOThread struct {
	TID         int    `json:"tid" doc:"id of the thread"`
	Voluntary   uint64 `json:"voluntary_switches" doc:"as it had nothing to do"`
	Involuntary uint64 `json:"involuntary_switches" doc:"though it had"`
}

// BlockIOWait is how long tasks of a container waited while somebody ran on their CPU.
type BlockIOWait struct {
	Victim  container.ID `json:"victim,string" doc:"id of the container that waited"`
	Culprit container.ID `json:"culprit,omitempty,string" doc:"id of the container that ran; absent for the host, and where it is not known"`
	Name    string       `json:"name" doc:"name of the culprit"`
	Share   float64      `json:"share" doc:"seconds of waiting in each second; several tasks add up"`
}

// BlockIODevice is a disk.
type BlockIODevice struct {
	Disk      string         `json:"disk" doc:"name of the disk"`
	Number    string         `json:"number" doc:"its device number, as 254:0"`
	Model     string         `json:"model,omitempty" doc:"model and serial number, where it tells them"`
	Scheduler string         `json:"scheduler" doc:"its I/O scheduler"`
	Capacity  BlockIOFigures `json:"capacity" doc:"what it can do; all absent if that is not known, and nothing can be reserved"`
	Headroom  float64        `json:"headroom" doc:"part of that which is never reserved"`
	Measured  bool           `json:"measured,omitempty" doc:"the capacity was measured"`
	Reserved  float64        `json:"reserved" doc:"part of the capacity that is reserved"`
	Support   string         `json:"support" doc:"what can be done to containers in the way there"`
}

// BlockIOEvent is something that happened to a reservation.
type BlockIOEvent struct {
	ID      uint64       `json:"id" doc:"grows by one from each event to the next; an agent begins with 1"`
	Time    time.Time    `json:"time" doc:"when"`
	Victim  container.ID `json:"victim,string" doc:"id of the container with the reservation"`
	Name    string       `json:"name,omitempty" doc:"its name"`
	Disk    string       `json:"disk" doc:"name of the disk"`
	What    string       `json:"what" doc:"interference, action, release or over"`
	Culprit container.ID `json:"culprit,omitempty,string" doc:"id of the container in the way"`
	Text    string       `json:"text" doc:"what shows it, or what was done"`
}

// BlockIOEventsAfter asks the feature for the events after an id, as soon as there are any
// or the context ends. The answer is a []BlockIOEvent.
type BlockIOEventsAfter uint64

func followBlockIO(b Backend, r *http.Request, after uint64) (out []streamed, err error) {
	got, err := b.Report(r.Context(), Ask{Feature: "blockio", Body: BlockIOEventsAfter(after)})
	events, _ := got.([]BlockIOEvent)
	for i, e := range events {
		if n := e.ID - after - 1; i == 0 && n > 0 && after > 0 {
			out = append(out, streamed{e.ID - 1, "missed", n})
		}
		out = append(out, streamed{ID: e.ID, Data: e})
	}
	return out, err
}

// FollowBlockIO gives the events of reservations after one with an id (0: all that are
// remembered), and goes on until ctx ends or the agent does. Its error is the last. Events
// that the agent does not remember any more are told by missed, if that is not nil.
func (c *Client) FollowBlockIO(ctx context.Context, after uint64, missed func(events uint64)) iter.Seq2[BlockIOEvent, error] {
	return func(yield func(BlockIOEvent, error) bool) {
		for s, err := range c.follow(ctx, "/v1/blockio/events", after) {
			var e BlockIOEvent
			data, _ := s.Data.(json.RawMessage)
			switch {
			case err != nil:
			case s.Name == "":
				err = json.Unmarshal(data, &e)
			case s.Name == "missed" && missed != nil:
				var n uint64
				if err = json.Unmarshal(data, &n); err == nil {
					missed(n)
					continue
				}
			case s.Name == "error":
				var f Failure
				if err = json.Unmarshal(data, &f); err == nil {
					err = &f.Error
				}
			default:
				continue
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

func blockio(b Backend, r *http.Request, ask Ask) (out BlockIO, err error) {
	ask.Feature = "blockio"
	got, err := b.Report(r.Context(), ask)
	if err == nil {
		out, _ = got.(BlockIO)
	}
	return out, err
}

func listReservations(b Backend, r *http.Request) (any, error) {
	out, err := blockio(b, r, Ask{})
	return Reservations{out.Reservations}, err
}

func oneReservation(b Backend, r *http.Request) (any, error) {
	return reservation(b, r, r.PathValue("id"))
}

func reservation(b Backend, r *http.Request, id string) (Reservation, error) {
	out, err := blockio(b, r, Ask{})
	if err != nil {
		return Reservation{}, err
	}
	i := slices.IndexFunc(out.Reservations, func(x Reservation) bool { return x.ID == id })
	if i < 0 {
		return Reservation{}, &Error{Status: http.StatusNotFound, Code: "not_found", Text: fmt.Sprintf("there is no reservation %q", id)}
	}
	return out.Reservations[i], nil
}

// setReserve sets policy as the feature says that a change asks for.
func setReserve(b Backend, r *http.Request, ref string, change ReservationChange) error {
	p, err := peer(r.Context())
	if err != nil {
		return err
	}
	got, err := b.Report(r.Context(), Ask{Feature: "blockio", Container: ref, Body: change})
	if err != nil {
		return err
	}
	in, ok := got.(SetRequest)
	if !ok {
		return errors.New("reserve: no answer from the feature")
	}
	_, err = b.Set(r.Context(), ref, p, in)
	return err
}

func reserve(b Backend, r *http.Request) (any, error) {
	var in ReservationRequest
	if err := read(r, &in); err != nil {
		return nil, err
	}
	if in.Container == "" {
		return nil, &Error{Status: http.StatusBadRequest, Code: "bad_request", Text: "no container is named"}
	}
	if err := setReserve(b, r, in.Container, ReservationChange{Device: in.Device, Figures: in.BlockIOFigures}); err != nil {
		return nil, err
	}
	out, err := blockio(b, r, Ask{Container: in.Container})
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(out.Reservations, func(x Reservation) bool { return x.Device == in.Device })
	if i < 0 {
		return nil, errors.New("reserve: the container has ended")
	}
	return out.Reservations[i], nil
}

func changeReservation(b Backend, r *http.Request) (any, error) {
	var in BlockIOFigures
	if err := read(r, &in); err != nil {
		return nil, err
	}
	was, err := reservation(b, r, r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	if err := setReserve(b, r, was.Container.String(), ReservationChange{ID: was.ID, Figures: in}); err != nil {
		return nil, err
	}
	return reservation(b, r, was.ID)
}

func deleteReservation(b Backend, r *http.Request) (any, error) {
	was, err := reservation(b, r, r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	return was, setReserve(b, r, was.Container.String(), ReservationChange{ID: was.ID, Delete: true})
}

func setCapacity(b Backend, r *http.Request) (any, error) {
	var in CapacityRequest
	if err := read(r, &in); err != nil {
		return nil, err
	}
	return b.Report(r.Context(), Ask{Feature: "blockio", Body: in})
}

// BlockIO says what block I/O containers have reserved and get: all if ref is "", else
// one, named as for Explain. With a time over other than 0, at most [MaxOver], the answer
// comes after that, and is about it.
func (c *Client) BlockIO(ctx context.Context, ref string, over time.Duration) (out BlockIO, err error) {
	return out, c.report(ctx, "blockio", ref, over, &out)
}

// Reservations lists what is reserved.
func (c *Client) Reservations(ctx context.Context) (out Reservations, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/reservations", nil, &out)
}

// Reserve reserves block I/O for a container.
func (c *Client) Reserve(ctx context.Context, in ReservationRequest) (out Reservation, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/reservations", in, &out)
}

// ChangeReservation reserves other figures in the place of those of one reservation.
func (c *Client) ChangeReservation(ctx context.Context, id string, in BlockIOFigures) (out Reservation, err error) {
	return out, c.do(ctx, http.MethodPatch, "/v1/reservations/"+url.PathEscape(id), in, &out)
}

// DeleteReservation ends a reservation that was made by hand.
func (c *Client) DeleteReservation(ctx context.Context, id string) (out Reservation, err error) {
	return out, c.do(ctx, http.MethodDelete, "/v1/reservations/"+url.PathEscape(id), nil, &out)
}

// SetCapacity says what a device can do.
func (c *Client) SetCapacity(ctx context.Context, in CapacityRequest) (out BlockIODevice, err error) {
	return out, c.do(ctx, http.MethodPost, "/v1/capacities", in, &out)
}

// SortBlockIO puts the rows and reservations into their order.
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
