package serve

import (
	"encoding/json"
	"flag"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

var update = flag.Bool("update", false, "write testdata/openapi.json anew")

type document struct {
	OpenAPI    string
	Paths      map[string]map[string]struct{ Summary, OperationID string }
	Components struct {
		Schemas map[string]struct {
			Properties map[string]struct{ Type, Description string }
			Required   []string
		}
	}
}

// The document has every route and every field, each with a description.
func TestOpenAPI(t *testing.T) {
	var doc document
	testkit.Must(t, json.Unmarshal(OpenAPI(), &doc))
	testkit.Same(t, "openapi", "3.1.0", doc.OpenAPI)
	ids := map[string]bool{}
	for _, r := range routes() {
		op := doc.Paths[r.path][strings.ToLower(r.method)]
		if op.Summary == "" || op.OperationID == "" || ids[op.OperationID] {
			t.Errorf("%s %s: %+v", r.method, r.path, op)
		}
		ids[op.OperationID] = true
	}
	for _, v := range []any{
		api.Container{}, api.Cgroup{}, api.Interface{}, api.HostEnd{}, api.Setting{}, api.FeatureStatus{}, api.Change{}, api.Explanation{}, api.Problem{}, api.Status{},
		api.SourceStatus{}, api.PolicyStatus{}, api.Feature{}, api.Samples{}, api.FeatureSamples{}, api.Sample{}, api.Version{}, api.RestoreRequest{}, api.Restored{},
		api.Outcome{}, api.Self{}, api.Label{}, api.NetCPU{}, api.NetCPUAccount{}, api.NetCPUCulprit{}, api.NetCPUWork{}, api.NetCPUTheft{}, api.SelfNetCPU{},
		api.Overlay{}, api.OverlayNetwork{}, api.OverlayTable{}, api.OverlayEviction{}, api.OverlayTraffic{}, api.OverlayReason{}, api.OverlayContainer{}, api.OverlayEnd{}, api.OverlayWay{}, api.OverlayFlow{}, api.Error{}, api.Failure{}, api.Finding{}, api.Verdict{},
	} {
		typ := reflect.TypeOf(v)
		schema, ok := doc.Components.Schemas[typ.Name()]
		if !ok {
			t.Errorf("no schema for %v", typ)
		}
		n := 0
		for _, f := range fields(typ) {
			n++
			name, _ := jsonName(f)
			p, ok := schema.Properties[name]
			if !ok || name == f.Name {
				t.Errorf("%v.%s: in the document: %v; name in JSON: %q", typ, f.Name, ok, name)
			}
			if p.Description == "" && typ != reflect.TypeFor[api.Finding]() && typ != reflect.TypeFor[api.Verdict]() { // the documentation describes what doctor prints
				t.Errorf("%v.%s has no doc", typ, f.Name)
			}
		}
		if n != len(schema.Properties) {
			t.Errorf("%v has %d fields, its schema %d", typ, n, len(schema.Properties))
		}
	}
	for name := range doc.Components.Schemas {
		if name == "" {
			t.Error("a schema without a name")
		}
	}
}

// The schema of a field is of the kind that encoding/json writes for it.
func TestOpenAPIKinds(t *testing.T) {
	var walk func(reflect.Type)
	seen := map[reflect.Type]bool{}
	walk = func(typ reflect.Type) {
		if seen[typ] || typ == reflect.TypeFor[time.Time]() {
			return
		}
		seen[typ] = true
		switch typ.Kind() {
		case reflect.Pointer, reflect.Slice:
			walk(typ.Elem())
		case reflect.Map:
			if typ.Key().Kind() != reflect.String {
				t.Errorf("%v: keys of %v", typ, typ.Key())
			}
			walk(typ.Elem())
		case reflect.Struct:
			for _, f := range fields(typ) {
				walk(f.Type)
			}
		case reflect.String, reflect.Bool, reflect.Float64, reflect.Int, reflect.Uint64:
		default:
			t.Errorf("the document has no word for %v", typ)
		}
	}
	for _, r := range routes() {
		walk(reflect.TypeOf(r.out))
	}
}

// The interface is a contract: a change of the document shows in this test, and in the diff of the
// file.
func TestOpenAPIGolden(t *testing.T) {
	const golden = "testdata/openapi.json"
	if *update {
		testkit.Must(t, os.WriteFile(golden, OpenAPI(), 0o644))
	}
	want, err := os.ReadFile(golden)
	testkit.Must(t, err)
	testkit.Same(t, "the interface has changed; go test ./agent/serve -update writes it down", string(want), string(OpenAPI()))
}
