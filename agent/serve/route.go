// Package serve answers on the agent's two sockets, one for people and programs and one for
// containers. It contains the routes, decides who may connect and change something, sends streams,
// and generates the OpenAPI document. It does not touch the host: it calls its [Backend], which
// package agent implements. Package api has the wire types.
package serve

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// Backend is the agent behind the server. Its errors are *[Error] if the caller is at fault; the
// server reports any other as an internal error.
type Backend interface {
	Containers(context.Context) ([]api.Container, error)
	Explain(ctx context.Context, ref string) (api.Explanation, error)
	Plan(ctx context.Context, ref string) ([]api.Planned, error)
	Doctor(context.Context) (api.Report, error)
	Status(context.Context) (api.Status, error)
	Samples(context.Context) (api.Samples, error)
	// Report returns the report of a feature. The result has the type that the feature's route
	// declares.
	Report(context.Context, api.Ask) (any, error)
	// Frame returns all reports as of one moment. Overview returns the difference between the last
	// two that the agent took.
	Frame(context.Context) (api.Frame, error)
	Overview(context.Context) (api.Overview, error)
	// Command makes a feature do what the Body says, or wait for it. The result has the type that
	// the Body declares.
	Command(context.Context, api.Ask) (any, error)
	Version(context.Context) (api.Version, error)
	Reload(context.Context) (api.PolicyStatus, error)
	Restore(ctx context.Context, ref string) (api.Restored, error)
	// Set sets values for the container that ref names, on behalf of a Peer, and clears others: all
	// of them or none.
	Set(ctx context.Context, ref string, by Peer, in api.SetRequest) (api.Container, error)
	Self(context.Context, Peer) (api.Self, error)
	// Caller returns the container of a connected process, or 0 if none is known. It is cheap, as
	// it is called before anything is read from the connection.
	Caller(Peer) api.ID
	// Panicked handles the value of a panic in the answer to a request, and returns the request's
	// error. The function that recovered it calls Panicked, which does not return if the agent
	// cannot continue.
	Panicked(request string, value any) error
}

// route is one endpoint, and its description in the OpenAPI document.
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
	// stream replaces call: it returns the events after an id, as soon as there are any. out is the
	// type of their data.
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

// plain declares a route whose answer does not depend on the request.
func plain[T any](method, path string, call func(Backend, context.Context) (T, error), summary string) route {
	var out T
	return route{method: method, path: path, out: out, summary: summary, call: func(b Backend, r *http.Request) (any, error) {
		return call(b, r.Context())
	}}
}

// report declares the two routes of a feature's report: GET /v1/NAME for all containers, and GET
// /v1/containers/{ref}/NAME for one. over describes the parameter over; "" means that there is
// none.
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

// selfAsk sends a feature a command on behalf of the caller's own container.
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

// OpenAPI returns the OpenAPI 3.1 document of this interface, as JSON. It is generated from the
// routes and the wire types, so it always matches them.
func OpenAPI() []byte {
	type m = map[string]any
	s := schemas{}
	paths := map[string]m{}
	for _, r := range routes() {
		op := m{
			"summary":     r.summary,
			"operationId": operationID(r),
			"responses": m{
				strconv.Itoa(r.done()): m{"description": "Done.", "content": content(s.of(reflect.TypeOf(r.out)))},
				"default":              m{"description": "An error, and why the request was not done.", "content": content(s.of(reflect.TypeFor[api.Failure]()))},
			},
		}
		if r.stream != nil {
			op["responses"].(m)[strconv.Itoa(r.done())] = m{
				"description": "An endless stream of server-sent events. The data of each event is JSON.",
				"content":     m{"text/event-stream": m{"schema": s.of(reflect.TypeOf(r.out))}},
			}
		}
		if r.in != nil {
			op["requestBody"] = m{"content": content(s.of(reflect.TypeOf(r.in)))}
		}
		var params []m
		for _, part := range strings.Split(r.path, "/") {
			if name, ok := strings.CutPrefix(part, "{"); ok {
				name = strings.TrimSuffix(name, "}")
				params = append(params, m{
					"name": name, "in": "path", "required": true, "schema": m{"type": "string"},
					"description": cmp.Or(r.params[name], "id, runtime id or name of the container, or at least the first 4 characters of its runtime id"),
				})
			}
		}
		for _, name := range slices.Sorted(maps.Keys(r.query)) {
			params = append(params, m{"name": name, "in": "query", "schema": m{"type": "string"}, "description": r.query[name]})
		}
		if params != nil {
			op["parameters"] = params
		}
		if paths[r.path] == nil {
			paths[r.path] = m{}
		}
		paths[r.path][strings.ToLower(r.method)] = op
	}
	paths["/v1/openapi.json"] = m{"get": m{
		"summary": "Show this document.", "operationId": "getOpenapi",
		"responses": m{"200": m{"description": "Done.", "content": content(m{"type": "object"})}},
	}}
	doc, _ := json.MarshalIndent(m{
		"openapi": "3.1.0",
		"info": m{
			"title":       "fairlead",
			"version":     api.Release,
			"description": "The HTTP interface of a fairlead agent, on a unix socket. Later releases may add fields to version 1, but never rename or remove any. Only root and the group " + api.Group + " may send requests that change something.",
			"license":     m{"name": "Apache-2.0", "identifier": "Apache-2.0"},
		},
		"paths":      paths,
		"components": m{"schemas": s},
	}, "", "  ") // maps of strings only: there is no error
	return append(doc, '\n')
}

func content(schema map[string]any) map[string]any {
	return map[string]any{"application/json": map[string]any{"schema": schema}}
}

// operationID returns getContainersExplain for GET /v1/containers/{ref}/explain, and
// getReservationsId for GET /v1/reservations/{id}.
func operationID(r route) string {
	id := strings.ToLower(r.method)
	for _, part := range strings.Split(strings.TrimPrefix(r.path, "/v1/"), "/") {
		if part = strings.Trim(part, "{}"); part != "ref" {
			id += strings.ToUpper(part[:1]) + part[1:]
		}
	}
	return id
}

// schemas are the JSON schemas of the named types met so far.
type schemas map[string]map[string]any

// of returns the schema of the JSON that encoding/json makes of t. Structs become named
// components.
func (s schemas) of(t reflect.Type) map[string]any {
	if t == reflect.TypeFor[time.Time]() {
		return map[string]any{"type": "string", "format": "date-time"}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return s.of(t.Elem())
	case reflect.Slice:
		return map[string]any{"type": "array", "items": s.of(t.Elem())}
	case reflect.Map:
		return map[string]any{"type": "object", "additionalProperties": s.of(t.Elem())}
	case reflect.Struct:
		s.add(t)
		return map[string]any{"$ref": "#/components/schemas/" + t.Name()}
	case reflect.String:
		return map[string]any{"type": "string"}
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.Float64:
		return map[string]any{"type": "number"}
	}
	return map[string]any{"type": "integer"} // the test refuses any other kind
}

func (s schemas) add(t reflect.Type) {
	if s[t.Name()] != nil {
		return
	}
	props, required := map[string]any{}, []string{}
	s[t.Name()] = map[string]any{"type": "object", "properties": props}
	for _, f := range fields(t) {
		name, opts := jsonName(f)
		prop := s.of(f.Type)
		if slices.Contains(opts, "string") {
			prop = map[string]any{"type": "string", "pattern": "^[0-9]+$"}
		}
		if doc := f.Tag.Get("doc"); doc != "" {
			prop["description"] = doc
		}
		props[name] = prop
		if !slices.Contains(opts, "omitempty") && !slices.Contains(opts, "omitzero") {
			required = append(required, name)
		}
	}
	if len(required) > 0 {
		s[t.Name()]["required"] = required
	}
}

// fields returns the fields of t that are in the JSON, including those of embedded
// structs.
func fields(t reflect.Type) []reflect.StructField {
	return slices.DeleteFunc(reflect.VisibleFields(t), func(f reflect.StructField) bool {
		return f.Anonymous || !f.IsExported() || f.Tag.Get("json") == "-"
	})
}

func jsonName(f reflect.StructField) (name string, opts []string) {
	parts := strings.Split(f.Tag.Get("json"), ",")
	if parts[0] == "" {
		parts[0] = f.Name
	}
	return parts[0], parts[1:]
}
