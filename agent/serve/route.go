// Package serve answers at the agent's two sockets, the one for people and programs and the one for
// containers. It has the routes, decides who may connect and change something, sends streams, and
// generates the OpenAPI document. It touches no state of the host: package agent calls it, and is
// its [Backend]. The wire types are package api's.
package serve

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// Backend is the agent that the server shows. Its errors are *[Error] where the caller is at fault;
// the server reports any other as an internal error.
type Backend interface {
	Containers(context.Context) ([]api.Container, error)
	Explain(ctx context.Context, ref string) (api.Explanation, error)
	Plan(ctx context.Context, ref string) ([]api.Planned, error)
	Doctor(context.Context) (api.Report, error)
	Status(context.Context) (api.Status, error)
	Samples(context.Context) (api.Samples, error)
	// Report asks a feature for its report. The result has the type that the feature's route
	// declares.
	Report(context.Context, api.Ask) (any, error)
	// Frame returns all reports as of one moment, and Overview what became of the last two that
	// the agent took by itself.
	Frame(context.Context) (api.Frame, error)
	Overview(context.Context) (api.Overview, error)
	// Command asks a feature to do what the Body says, or to wait for it. The result has the type
	// that the Body declares.
	Command(context.Context, api.Ask) (any, error)
	Version(context.Context) (api.Version, error)
	Reload(context.Context) (api.PolicyStatus, error)
	Restore(ctx context.Context, ref string) (api.Restored, error)
	// Set sets values for the container that ref names, on behalf of a Peer, and removes
	// others: all of them or none.
	Set(ctx context.Context, ref string, by Peer, in api.SetRequest) (api.Container, error)
	Self(context.Context, Peer) (api.Self, error)
	// Caller returns the container of a process that has connected, or 0 if it is in no known
	// container. It is cheap: it is called before anything is read from the connection.
	Caller(Peer) api.ID
	// Panicked takes the value of a panic in the answer to a request, in the deferred function that
	// has recovered it, and returns the request's error. It does not return if the agent cannot go on.
	Panicked(request string, value any) error
}

// route is one endpoint, and its description for the document.
type route struct {
	method, path string
	summary      string
	query        map[string]string // description of each parameter, by name
	params       map[string]string // the same for the parameters of the path; {ref} is a container
	status       int               // of an answer without an error; 0 is 200
	in           any               // zero value of the body's type, nil for none
	out          any               // zero value of the answer's type
	self         bool
	call         func(Backend, *http.Request) (any, error)
	// stream, in place of call, returns the events after an id, as soon as there are any; out
	// is the type of their data.
	stream func(b Backend, r *http.Request, after uint64) ([]streamed, error)
}

// routes returns all endpoints of version 1. Endpoints that change something are POST.
func routes() []route {
	return slices.Concat(featureRoutes(), []route{
		plain("GET", "/v1/containers", Backend.Containers, "List the containers that run now, sorted by name."),
		plain("GET", "/v1/doctor", Backend.Doctor, "Say what this host can do. It is tried anew, which takes up to two seconds."),
		plain("GET", "/v1/status", Backend.Status, "Say how the agent stands: sources, policy, features."),
		plain("GET", "/v1/samples", Backend.Samples, "Read what the features measured, by container. Histograms are on the metrics page only."),
		plain("GET", "/v1/frame", Backend.Frame, "Read all reports at one moment, with the containers that run. Two frames show what happened in between, and a recording consists of them. Nothing is measured for it that is not measured anyway."),
		plain("GET", "/v1/overview", Backend.Overview, "Say how each container stands, the most slowed first: how much slower it runs because of its neighbours, by whom and by what. The agent computes it every few seconds."),
		plain("GET", "/v1/version", Backend.Version, "Say what runs."),
		plain("POST", "/v1/policy/reload", Backend.Reload, "Read the policy files again, and end what restore holds. Policy that cannot be used is told in the answer; the last good one then stays in force, if there is one."),
		{
			method: "GET", path: "/v1/containers/{ref}/explain", out: api.Explanation{},
			summary: "Say what was changed on the host for one container, by which line of policy, with the value before and now.",
			call:    func(b Backend, r *http.Request) (any, error) { return b.Explain(r.Context(), r.PathValue("ref")) },
		}, {
			method: "GET", path: "/v1/containers/{ref}/plan", out: []api.Planned{},
			summary: "Say what features would change on the host for one container, whatever its policy is now. Nothing is changed.",
			call:    func(b Backend, r *http.Request) (any, error) { return b.Plan(r.Context(), r.PathValue("ref")) },
		}, {
			method: "POST", path: "/v1/restore", in: api.RestoreRequest{}, out: api.Restored{},
			summary: "Undo what is applied to one container, or to all, and hold it so until the next policy reload.",
			call:    taking(restore),
		}, {
			method: "POST", path: "/v1/containers/{ref}/set", in: api.SetRequest{}, out: api.Container{},
			summary: "Give a running container values above those of files and labels, until it ends, and take such values back. All or nothing: what is no value, or contradicts the rest, or is refused by a feature (as bandwidth that no uplink has) changes nothing, with the reason.",
			call:    taking(set),
		}, {
			method: "GET", path: "/v1/self", out: api.Self{}, self: true,
			summary: "Tell the calling container about itself. Served on the self socket only.",
			call:    self,
		},
	})
}

// plain declares a route with an answer that does not depend on the request.
func plain[T any](method, path string, call func(Backend, context.Context) (T, error), summary string) route {
	var out T
	return route{method: method, path: path, out: out, summary: summary, call: func(b Backend, r *http.Request) (any, error) {
		return call(b, r.Context())
	}}
}

// report declares the two routes of a feature's report: GET /v1/NAME, about all containers, and GET
// /v1/containers/{ref}/NAME, about one. over describes the parameter of that name; "" means that
// there is none.
func report(feature string, out any, over, all, one string) []route {
	var query map[string]string
	if over != "" {
		query = map[string]string{"over": over}
	}
	call := func(b Backend, r *http.Request) (any, error) {
		ask := api.Ask{Feature: feature, Container: r.PathValue("ref")}
		if text := r.URL.Query().Get("over"); over != "" && text != "" {
			var err error
			if ask.Over, err = time.ParseDuration(text); err != nil || ask.Over <= 0 || ask.Over > api.MaxOver {
				return nil, &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: fmt.Sprintf("over=%q: want a time of at most %v, as 200ms", text, api.MaxOver)}
			}
		}
		return b.Report(r.Context(), ask)
	}
	return []route{
		{method: "GET", path: "/v1/" + feature, query: query, out: out, summary: all, call: call},
		{method: "GET", path: "/v1/containers/{ref}/" + feature, query: query, out: out, summary: one, call: call},
	}
}

func restore(b Backend, r *http.Request, in api.RestoreRequest) (any, error) {
	return b.Restore(r.Context(), in.Container)
}

func set(b Backend, r *http.Request, in api.SetRequest) (any, error) {
	p, err := peer(r.Context())
	if err != nil {
		return nil, err
	}
	return b.Set(r.Context(), r.PathValue("ref"), p, in)
}

// selfAsk gives a feature a command on behalf of the caller's own container.
func selfAsk(b Backend, r *http.Request, ask api.Ask) (any, error) {
	p, err := turn(r.Context())
	if err != nil {
		return nil, err
	}
	id := b.Caller(p)
	if id == 0 {
		return nil, &api.Error{Status: http.StatusNotFound, Code: "not_found", Text: "the caller is in no container that is known here"}
	}
	ask.Container, ask.Self = api.Ref(id), true
	return b.Command(r.Context(), ask)
}

func self(b Backend, r *http.Request) (any, error) {
	p, err := turn(r.Context())
	if err != nil {
		return nil, err
	}
	return b.Self(r.Context(), p)
}
