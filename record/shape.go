package record

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// The kinds of a shape.
const (
	kindBool    = "bool"
	kindInt     = "int"
	kindUint    = "uint"
	kindFloat   = "float"
	kindString  = "string"
	kindTime    = "time"
	kindStruct  = "struct"
	kindList    = "list"
	kindMap     = "map" // of strings to strings
	kindPointer = "pointer"
)

// shape is how values of a type are written. A recording carries the shape of its frames, so that a
// reader of another version finds the fields that both know, by their names in JSON, and passes over
// the rest.
type shape struct {
	Kind   string  `json:"k"`
	Fields []field `json:"f,omitempty"` // of a struct
	Elem   *shape  `json:"e,omitempty"` // of a list or a pointer

	zero reflect.Value // of the Go type; invalid: a reader passes over such values
	keys [][]int       // of a struct in a list: the fields by which an element is found again
}

type field struct {
	Name  string `json:"n"`
	Shape *shape `json:"s"`

	index []int // in the Go type; nil: it has no such field
}

// The bounds of a shape in a recording.
const (
	maxDepth  = 16
	maxShapes = 1 << 13
)

// keyNames are names of fields that distinguish elements of a list which concern the same
// containers. They only make a recording smaller: a wrong match makes a longer delta.
func keyNames() []string {
	return []string{"kind", "direction", "protocol", "uplink", "disk", "stage", "network", "device", "feature", "key", "id"}
}

// shapeOf returns the shape of a Go type. It supports what the wire types consist of.
func shapeOf(t reflect.Type) (*shape, error) {
	s := &shape{zero: reflect.Zero(t)}
	var err error
	switch {
	case t == reflect.TypeFor[time.Time]():
		s.Kind = kindTime
	case t.Kind() == reflect.Bool:
		s.Kind = kindBool
	case t.Kind() == reflect.Int || t.Kind() == reflect.Int64:
		s.Kind = kindInt
	case t.Kind() == reflect.Uint64:
		s.Kind = kindUint
	case t.Kind() == reflect.Float64:
		s.Kind = kindFloat
	case t.Kind() == reflect.String:
		s.Kind = kindString
	case t == reflect.TypeFor[map[string]string]():
		s.Kind = kindMap
	case t.Kind() == reflect.Slice:
		s.Kind = kindList
		s.Elem, err = shapeOf(t.Elem())
	case t.Kind() == reflect.Pointer:
		s.Kind = kindPointer
		s.Elem, err = shapeOf(t.Elem())
	case t.Kind() == reflect.Struct:
		s.Kind = kindStruct
		err = s.addFields(t)
	default:
		err = errors.New("no such values are recorded")
	}
	if err != nil {
		return nil, fmt.Errorf("%v: %w", t, err)
	}
	return s, nil
}

// addFields adds the fields of a struct. Those of an embedded struct are its own, as in JSON.
func (s *shape) addFields(t reflect.Type) error {
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && name == "" || !f.IsExported() {
			continue
		}
		of, err := shapeOf(f.Type)
		if err != nil {
			return err
		}
		s.Fields = append(s.Fields, field{Name: name, Shape: of, index: f.Index})
		if f.Type == reflect.TypeFor[api.ID]() || of.Kind == kindString && slices.Contains(keyNames(), name) {
			s.keys = append(s.keys, f.Index)
		}
	}
	return nil
}

// bind makes s, from a recording, the shape of values of a Go type: with the fields of the same name
// and kind. It returns an error if s is beyond the bounds, or is no shape.
func (s *shape) bind(t *shape) error {
	room := maxShapes
	return s.bindIn(t, maxDepth, &room)
}

func (s *shape) bindIn(t *shape, depth int, room *int) error {
	if *room--; *room < 0 || depth == 0 {
		return errors.New("the frames have too many fields")
	}
	if t != nil && t.Kind == s.Kind {
		s.zero = t.zero
	} else {
		t = &shape{}
	}
	switch s.Kind {
	case kindBool, kindInt, kindUint, kindFloat, kindString, kindTime, kindMap:
		return nil
	case kindList, kindPointer:
		if s.Elem == nil {
			return fmt.Errorf("a %s of nothing", s.Kind)
		}
		if err := s.Elem.bindIn(t.Elem, depth-1, room); err != nil {
			return err
		}
		if !s.Elem.zero.IsValid() {
			s.zero = reflect.Value{} // its elements are of another kind here
		}
		return nil
	case kindStruct:
		for i := range s.Fields {
			f := &s.Fields[i]
			if f.Shape == nil {
				return fmt.Errorf("field %q has no shape", f.Name)
			}
			var known field
			if j := slices.IndexFunc(t.Fields, func(k field) bool { return k.Name == f.Name }); j >= 0 {
				known = t.Fields[j]
			}
			if err := f.Shape.bindIn(known.Shape, depth-1, room); err != nil {
				return err
			}
			if f.Shape.zero.IsValid() {
				f.index = known.index
			}
		}
		return nil
	}
	return fmt.Errorf("a value of kind %q", s.Kind)
}
