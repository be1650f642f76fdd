package serve

import (
	"encoding/json"
	"flag"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

var update = flag.Bool("update", false, "write testdata/openapi.json anew")

// The document has every route, and describes every field.
func TestOpenAPI(t *testing.T) {
	var doc struct {
		OpenAPI    string
		Paths      map[string]map[string]struct{ Summary, OperationID string }
		Components struct {
			Schemas map[string]struct {
				Properties map[string]struct{ Description string }
			}
		}
	}
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
	for name, schema := range doc.Components.Schemas {
		for field, p := range schema.Properties {
			if p.Description == "" && name != "Finding" && name != "Verdict" { // the documentation describes what doctor prints
				t.Errorf("%s.%s has no doc", name, field)
			}
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
