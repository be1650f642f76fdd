package serve

import (
	"cmp"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// OpenAPI returns the OpenAPI 3.1 document of this interface, as JSON. It is generated
// from the routes and the wire types, so it always agrees with them.
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
