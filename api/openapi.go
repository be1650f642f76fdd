package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// OpenAPI gives the document of this interface, version 3.1, as JSON. It is
// made from the routes and the wire types, so that it cannot fall behind them.
func OpenAPI() []byte {
	type m = map[string]any
	s := schemas{}
	paths := m{}
	for _, r := range routes() {
		op := m{
			"summary":     r.summary,
			"operationId": operationID(r),
			"responses": m{
				strconv.Itoa(r.done()): m{"description": "Done.", "content": content(s.of(reflect.TypeOf(r.out)))},
				"default":              m{"description": "Not done, and why.", "content": content(s.of(reflect.TypeFor[Failure]()))},
			},
		}
		if r.stream != nil {
			op["responses"].(m)[strconv.Itoa(r.done())] = m{
				"description": "Server-sent events, without end. The data of each is JSON.",
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
					"description": cmp.Or(r.params[name], "id, runtime id, name, or a start of the runtime id of at least 4 characters"),
				})
			}
		}
		for _, name := range slices.Sorted(maps.Keys(r.query)) {
			params = append(params, m{"name": name, "in": "query", "schema": m{"type": "string"}, "description": r.query[name]})
		}
		if params != nil {
			op["parameters"] = params
		}
		item, _ := paths[r.path].(m)
		if item == nil {
			item = m{}
			paths[r.path] = item
		}
		item[strings.ToLower(r.method)] = op
	}
	paths["/v1/openapi.json"] = m{"get": m{
		"summary": "Give this document.", "operationId": "getOpenapi",
		"responses": m{"200": m{"description": "Done.", "content": content(m{"type": "object"})}},
	}}
	doc, err := json.MarshalIndent(m{
		"openapi": "3.1.0",
		"info": m{
			"title":       "fairlead",
			"version":     "1",
			"description": "The interface of a fairlead agent, HTTP over a unix socket. Fields are added to version 1, never renamed or removed. Requests that change something are for root and the group " + Group + ".",
			"license":     m{"name": "Apache-2.0", "identifier": "Apache-2.0"},
		},
		"paths":      paths,
		"components": m{"schemas": s},
	}, "", "  ")
	if err != nil { // maps of strings only: cannot be
		return []byte(fmt.Sprintf("%q", err))
	}
	return append(doc, '\n')
}

func content(schema map[string]any) map[string]any {
	return map[string]any{"application/json": map[string]any{"schema": schema}}
}

// operationID makes getContainersExplain of GET /v1/containers/{ref}/explain, and
// getReservationsId of GET /v1/reservations/{id}.
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

// of gives the schema of t as encoding/json writes it. Structs become named
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
	for f := range fields(t) {
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

// fields yields the fields of t that JSON shows, with those of embedded
// structs in their place.
func fields(t reflect.Type) func(func(reflect.StructField) bool) {
	return func(yield func(reflect.StructField) bool) {
		for _, f := range reflect.VisibleFields(t) {
			if f.Anonymous || !f.IsExported() || f.Tag.Get("json") == "-" {
				continue
			}
			if !yield(f) {
				return
			}
		}
	}
}

func jsonName(f reflect.StructField) (name string, opts []string) {
	parts := strings.Split(f.Tag.Get("json"), ",")
	if parts[0] == "" {
		parts[0] = f.Name
	}
	return parts[0], parts[1:]
}
