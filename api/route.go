package api

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// Backend is what the server shows: an agent. Its errors are *[Error] where
// the caller is at fault; any other is told as an internal one.
type Backend interface {
	Containers(context.Context) ([]Container, error)
	Explain(ctx context.Context, ref string) (Explanation, error)
	Doctor(context.Context) (probe.Report, error)
	Status(context.Context) (Status, error)
	Samples(context.Context) (Samples, error)
	// NetCPU says whose packets took whose CPU time: of all, or of and from the
	// container that ref names.
	NetCPU(ctx context.Context, ref string) (NetCPU, error)
	// Traffic says what bandwidth containers are due and get: all, or the one
	// that ref names; with a time over other than 0 it measures delays for that
	// long first.
	Traffic(ctx context.Context, ref string, over time.Duration) (Traffic, error)
	Version(context.Context) (Version, error)
	Reload(context.Context) (PolicyStatus, error)
	Restore(ctx context.Context, ref string) (Restored, error)
	// Set gives the container that ref names values by hand, on behalf of a Peer,
	// and takes others back: all of them or none.
	Set(ctx context.Context, ref string, by Peer, in SetRequest) (Container, error)
	Self(context.Context, Peer) (Self, error)
	// Caller says which container a process that has connected is in, at little
	// cost: it is asked before anything is read from there. 0: none that is known.
	Caller(Peer) container.ID
}

// route is one endpoint, and what the document says of it.
type route struct {
	method, path string
	summary      string
	query        map[string]string // what each parameter is, by name
	in           any               // zero value of the body's type, nil for none
	out          any               // zero value of the answer's type
	self         bool
	call         func(Backend, *http.Request) (any, error)
}

// routes are all endpoints of version 1. Those that change something are POST.
func routes() []route {
	return []route{
		{
			method: "GET", path: "/v1/containers", out: []Container{},
			summary: "List the containers that run now, sorted by name.",
			call:    func(b Backend, r *http.Request) (any, error) { return b.Containers(r.Context()) },
		}, {
			method: "GET", path: "/v1/containers/{ref}/explain", out: Explanation{},
			summary: "Say what was changed on the host for one container, by which line of policy, with the value before and now.",
			call:    func(b Backend, r *http.Request) (any, error) { return b.Explain(r.Context(), r.PathValue("ref")) },
		}, {
			method: "GET", path: "/v1/doctor", out: probe.Report{},
			summary: "Say what this host can do. It is tried anew, which takes up to two seconds.",
			call:    func(b Backend, r *http.Request) (any, error) { return b.Doctor(r.Context()) },
		}, {
			method: "GET", path: "/v1/status", out: Status{},
			summary: "Say how the agent stands: sources, policy, features.",
			call:    func(b Backend, r *http.Request) (any, error) { return b.Status(r.Context()) },
		}, {
			method: "GET", path: "/v1/samples", out: Samples{},
			summary: "Read what the features measured, by container. Histograms are on the metrics page only.",
			call:    func(b Backend, r *http.Request) (any, error) { return b.Samples(r.Context()) },
		}, {
			method: "GET", path: "/v1/netcpu", out: NetCPU{},
			summary: "Say whose packets took whose CPU time, since the agent began to count. Two readings give a rate.",
			call:    func(b Backend, r *http.Request) (any, error) { return b.NetCPU(r.Context(), "") },
		}, {
			method: "GET", path: "/v1/containers/{ref}/netcpu", out: NetCPU{},
			summary: "The same for one container: its account, and those entries of the matrix that it has a part in. The totals are the host's.",
			call:    func(b Backend, r *http.Request) (any, error) { return b.NetCPU(r.Context(), r.PathValue("ref")) },
		}, {
			method: "GET", path: "/v1/traffic", out: Traffic{},
			summary: "Say what bandwidth each shaped container is due at the uplinks, and what it has sent. Two readings give a rate.",
			query:   map[string]string{"over": over},
			call:    traffic,
		}, {
			method: "GET", path: "/v1/containers/{ref}/traffic", out: Traffic{},
			summary: "The same for one container. There is nothing in it if policy asks for none.",
			query:   map[string]string{"over": over},
			call:    traffic,
		}, {
			method: "GET", path: "/v1/version", out: Version{},
			summary: "Say what runs.",
			call:    func(b Backend, r *http.Request) (any, error) { return b.Version(r.Context()) },
		}, {
			method: "POST", path: "/v1/policy/reload", out: PolicyStatus{},
			summary: "Read the policy files again, and end what restore holds. Policy that cannot be used is told in the answer; the last good one then stays in force.",
			call:    func(b Backend, r *http.Request) (any, error) { return b.Reload(r.Context()) },
		}, {
			method: "POST", path: "/v1/restore", in: RestoreRequest{}, out: Restored{},
			summary: "Undo what is applied to one container, or to all, and hold it so until the next policy reload.",
			call:    restore,
		}, {
			method: "POST", path: "/v1/containers/{ref}/set", in: SetRequest{}, out: Container{},
			summary: "Give a running container values above those of files and labels, until it ends, and take such values back. All or nothing: what is no value, or contradicts the rest, or is refused by a feature (as bandwidth that no uplink has) changes nothing, with the reason.",
			call:    set,
		}, {
			method: "GET", path: "/v1/self", out: Self{}, self: true,
			summary: "Tell the calling container about itself. Served on the self socket only.",
			call:    self,
		},
	}
}

// MaxOver is the longest time over which an agent measures for one request.
const MaxOver = 30 * time.Second

const over = "a time, as 200ms, at most 30s: the answer comes after it, and says how long packets waited meanwhile"

func traffic(b Backend, r *http.Request) (any, error) {
	var d time.Duration
	if text := r.URL.Query().Get("over"); text != "" {
		var err error
		if d, err = time.ParseDuration(text); err != nil || d <= 0 || d > MaxOver {
			return nil, &Error{Status: http.StatusBadRequest, Code: "bad_request", Text: fmt.Sprintf("over=%q: want a time of at most %v, as 200ms", text, MaxOver)}
		}
	}
	return b.Traffic(r.Context(), r.PathValue("ref"), d)
}

func restore(b Backend, r *http.Request) (any, error) {
	var in RestoreRequest
	if err := read(r, &in); err != nil {
		return nil, err
	}
	return b.Restore(r.Context(), in.Container)
}

func set(b Backend, r *http.Request) (any, error) {
	var in SetRequest
	if err := read(r, &in); err != nil {
		return nil, err
	}
	p, err := peer(r.Context())
	if err != nil {
		return nil, err
	}
	return b.Set(r.Context(), r.PathValue("ref"), p, in)
}

func self(b Backend, r *http.Request) (any, error) {
	p, err := peer(r.Context())
	if err != nil {
		return nil, err
	}
	if err := turn(r.Context()); err != nil {
		return nil, err
	}
	return b.Self(r.Context(), p)
}
