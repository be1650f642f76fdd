package serve

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

func blockioRoutes() []route {
	one := map[string]string{"id": "id of a reservation"}
	return append(report("blockio", api.BlockIO{},
		"how long to measure, such as 1s, at most 30s: the agent answers after that time. Without it, the answer is about the last second that was measured",
		"Show the block I/O that each container has reserved and achieves, who interferes with it, and what the agent does about that, with the disks and the latest events.",
		"The same for one container."),
		route{method: "GET", path: "/v1/blockio/events", out: api.BlockIOEvent{}, stream: followBlockIO,
			summary: "Follow the events of reservations, as server-sent events. The stream starts with the oldest event that the agent still has, or after the one in the header Last-Event-ID. Its first event, named state, counts the readers, and those that were dropped because they read too slowly. An event named missed counts the events that the agent no longer has."},
		route{method: "GET", path: "/v1/reservations", out: api.Reservations{}, call: listReservations,
			summary: "List the reservations of block I/O, including those from policy, with the I/O that each achieves."},
		route{method: "POST", path: "/v1/reservations", in: api.ReservationRequest{}, out: api.Reservation{}, status: http.StatusCreated, call: taking(reserve),
			summary: "Reserve block I/O of a device for a running container, until the container ends. The request is refused if the device does not have that much left, or if the container already has a reservation there. The error names what is left, and the containers that hold the rest."},
		route{method: "GET", path: "/v1/reservations/{id}", params: one, out: api.Reservation{}, call: func(b Backend, r *http.Request) (any, error) { return reservation(b, r) },
			summary: "Show one reservation."},
		route{method: "PATCH", path: "/v1/reservations/{id}", params: one, in: api.BlockIOFigures{}, out: api.Reservation{}, call: taking(changeReservation),
			summary: "Replace the figures of one reservation. A refused request leaves it unchanged. The new figures override a reservation from policy until they are deleted or the container ends."},
		route{method: "DELETE", path: "/v1/reservations/{id}", params: one, out: api.Reservation{}, call: deleteReservation,
			summary: "Delete one reservation that was made by hand. A reservation from policy applies again. The answer is the deleted reservation."},
		route{method: "POST", path: "/v1/capacities", in: api.CapacityRequest{}, out: api.BlockIODevice{}, status: http.StatusCreated, call: taking(setCapacity),
			summary: "Set the capacity of a device, measured or given by its operator. The agent keeps it in its file --disk-capacities, which outlives a reboot; the status is 503 if it cannot write the file. Reservations that exceed the new capacity stay."},
	)
}

func followBlockIO(b Backend, r *http.Request, after uint64) (out []streamed, err error) {
	got, err := b.Command(r.Context(), api.Ask{Feature: "blockio", Body: api.BlockIOEventsAfter(after)})
	events, _ := got.([]api.BlockIOEvent)
	for i, e := range events {
		if n := e.ID - after - 1; i == 0 && n > 0 && after > 0 {
			out = append(out, streamed{e.ID - 1, "missed", n})
		}
		out = append(out, streamed{ID: e.ID, Data: e})
	}
	return out, err
}

func blockio(b Backend, r *http.Request, ask api.Ask) (out api.BlockIO, err error) {
	ask.Feature = "blockio"
	got, err := b.Report(r.Context(), ask)
	out, _ = got.(api.BlockIO)
	return out, err
}

func listReservations(b Backend, r *http.Request) (any, error) {
	out, err := blockio(b, r, api.Ask{})
	return api.Reservations{Reservations: out.Reservations}, err
}

// reservation returns the reservation that the path names.
func reservation(b Backend, r *http.Request) (api.Reservation, error) {
	id := r.PathValue("id")
	return reservationThat(b, r, api.Ask{}, func(x api.Reservation) bool { return x.ID == id },
		&api.Error{Status: http.StatusNotFound, Code: "not_found", Text: fmt.Sprintf("there is no reservation %q", id)})
}

// reservationThat returns the first reservation in a report that is accepts, or the error none.
func reservationThat(b Backend, r *http.Request, ask api.Ask, is func(api.Reservation) bool, none error) (api.Reservation, error) {
	out, err := blockio(b, r, ask)
	if i := slices.IndexFunc(out.Reservations, is); err == nil && i >= 0 {
		return out.Reservations[i], nil
	}
	return api.Reservation{}, cmp.Or(err, none)
}

// setReserve sets the policy that the feature chooses for a change.
func setReserve(b Backend, r *http.Request, ref string, change api.ReservationChange) error {
	p, err := peer(r.Context())
	if err != nil {
		return err
	}
	got, err := b.Command(r.Context(), api.Ask{Feature: "blockio", Container: ref, Body: change})
	if err != nil {
		return err
	}
	in, ok := got.(api.SetRequest)
	if !ok {
		return errors.New("reserve: no answer from the feature")
	}
	_, err = b.Set(r.Context(), ref, p, in)
	return err
}

func reserve(b Backend, r *http.Request, in api.ReservationRequest) (any, error) {
	if in.Container == "" {
		return nil, &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: "no container is named"}
	}
	if err := setReserve(b, r, in.Container, api.ReservationChange{Device: in.Device, Replace: in.Replace, Figures: in.BlockIOFigures}); err != nil {
		return nil, err
	}
	ask := api.Ask{Container: in.Container, Over: time.Second / 4} // which shows what CPU time it takes
	return reservationThat(b, r, ask, func(x api.Reservation) bool { return x.Device == in.Device }, errors.New("reserve: the container has ended"))
}

func changeReservation(b Backend, r *http.Request, in api.BlockIOFigures) (any, error) {
	was, err := reservation(b, r)
	if err != nil {
		return nil, err
	}
	if err := setReserve(b, r, api.Ref(was.Container), api.ReservationChange{ID: was.ID, Figures: in}); err != nil {
		return nil, err
	}
	return reservation(b, r)
}

func deleteReservation(b Backend, r *http.Request) (any, error) {
	was, err := reservation(b, r)
	if err != nil {
		return nil, err
	}
	return was, setReserve(b, r, api.Ref(was.Container), api.ReservationChange{ID: was.ID, Delete: true})
}

func setCapacity(b Backend, r *http.Request, in api.CapacityRequest) (any, error) {
	return b.Command(r.Context(), api.Ask{Feature: "blockio", Body: in})
}
