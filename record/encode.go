package record

import (
	"encoding/binary"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// exact is the magnitude below which a float is written as a multiple of 1e-9: most are nanoseconds
// in seconds. Beyond it is written as it is.
const exact = float64(1<<50) / 1e9

// A delta is what of a value differs from the same value in the frame before, which may be a zero
// value. Values that do not differ have no delta. By kind of shape:
//
//	bool     nothing: it is the other one
//	int      the difference, zigzag varint; of uint and float likewise, see number
//	string   length, bytes
//	time     1 and the difference in nanoseconds; 0 for no time
//	map      1 + number of pairs, or 0 for nil; the pairs, sorted
//	struct   a bit for each field that differs; the deltas of these
//	pointer  0: nil; 1: not nil, and the delta; 2: not nil, and no delta
//	list     1 + length, or 0 for nil; for each element a code, and the delta if bit 0 of it is set.
//	         The rest of the code is 0: as against the element in turn of the list before, 1: against
//	         a zero value, 2 + n: as against the element n (zigzag) after the one in turn
//
// encoder writes frames as deltas.
type encoder struct {
	shape *shape
	last  api.Frame
	buf   []byte
}

// encode returns the delta of f, against the frame before, or against none if key is set. The result
// is valid until the next call. The encoder keeps f.
func (e *encoder) encode(f api.Frame, key bool) []byte {
	if key {
		e.last = api.Frame{}
	}
	e.buf = e.buf[:0]
	e.value(e.shape, reflect.ValueOf(&f).Elem(), reflect.ValueOf(&e.last).Elem())
	e.last = f
	return e.buf
}

func (e *encoder) uint(n uint64)  { e.buf = binary.AppendUvarint(e.buf, n) }
func (e *encoder) int(n int64)    { e.buf = binary.AppendVarint(e.buf, n) }
func (e *encoder) text(s string)  { e.uint(uint64(len(s))); e.buf = append(e.buf, s...) }
func (e *encoder) back(to int)    { e.buf = e.buf[:to] }
func (e *encoder) flag(code byte) { e.buf = append(e.buf, code) }

// value appends the delta of v, and reports whether there is one.
func (e *encoder) value(s *shape, v, was reflect.Value) bool {
	switch s.Kind {
	case kindBool:
		return v.Bool() != was.Bool()
	case kindInt:
		if v.Int() == was.Int() {
			return false
		}
		e.int(v.Int() - was.Int())
	case kindUint:
		if v.Uint() == was.Uint() {
			return false
		}
		e.int(int64(v.Uint() - was.Uint()))
	case kindFloat:
		return e.float(v.Float(), was.Float())
	case kindString:
		if v.String() == was.String() {
			return false
		}
		e.text(v.String())
	case kindTime:
		return e.time(timeOf(v), timeOf(was))
	case kindMap:
		return e.pairs(v, was)
	case kindStruct:
		return e.fields(s, v, was)
	case kindPointer:
		return e.pointer(s, v, was)
	case kindList:
		return e.list(s, v, was)
	}
	return true
}

// rounded returns f in units of 1e-9. ok is false if f is too large for that.
func rounded(f float64) (n int64, ok bool) {
	if !(math.Abs(f) < exact) { // also NaN
		return 0, false
	}
	return int64(math.Round(f * 1e9)), true
}

// float writes the difference of two floats in units of 1e-9, with 0 as its lowest bit; or 1 and the
// difference of the bits.
func (e *encoder) float(v, was float64) bool {
	n, ok := rounded(v)
	before, _ := rounded(was)
	if ok {
		_, small := rounded(was)
		if small && n == before {
			return false
		}
		e.uint(zigzag(n-before) << 1)
		return true
	}
	if math.Float64bits(v) == math.Float64bits(was) {
		return false
	}
	e.uint(1)
	e.int(int64(math.Float64bits(v) - math.Float64bits(was)))
	return true
}

func zigzag(n int64) uint64 { return uint64(n<<1) ^ uint64(n>>63) }

func unzigzag(u uint64) int64 { return int64(u>>1) ^ -int64(u&1) }

func timeOf(v reflect.Value) time.Time {
	t, _ := reflect.TypeAssert[time.Time](v)
	return t
}

// nanoseconds returns t since 1970. ok is false for no time, and for years that the unit does not
// reach.
func nanoseconds(t time.Time) (n int64, ok bool) {
	if y := t.Year(); y < 1700 || y > 2250 {
		return 0, false
	}
	return t.UnixNano(), true
}

func (e *encoder) time(t, was time.Time) bool {
	n, ok := nanoseconds(t)
	before, had := nanoseconds(was)
	switch {
	case ok == had && n == before:
		return false
	case !ok:
		e.flag(0)
	default:
		e.flag(1)
		e.int(n - before)
	}
	return true
}

func (e *encoder) pairs(v, was reflect.Value) bool {
	m, _ := reflect.TypeAssert[map[string]string](v)
	before, _ := reflect.TypeAssert[map[string]string](was)
	switch {
	case maps.Equal(m, before) && (m == nil) == (before == nil):
		return false
	case m == nil:
		e.flag(0)
		return true
	}
	e.uint(uint64(len(m)) + 1)
	for _, k := range slices.Sorted(maps.Keys(m)) {
		e.text(k)
		e.text(m[k])
	}
	return true
}

func (e *encoder) fields(s *shape, v, was reflect.Value) bool {
	start := len(e.buf)
	e.buf = append(e.buf, make([]byte, (len(s.Fields)+7)/8)...)
	differs := false
	for i := range s.Fields {
		f := &s.Fields[i]
		if e.value(f.Shape, v.FieldByIndex(f.index), was.FieldByIndex(f.index)) {
			e.buf[start+i/8] |= 1 << (i % 8)
			differs = true
		}
	}
	if !differs {
		e.back(start)
	}
	return differs
}

func (e *encoder) pointer(s *shape, v, was reflect.Value) bool {
	if v.IsNil() {
		if was.IsNil() {
			return false
		}
		e.flag(0)
		return true
	}
	start, before := len(e.buf), s.Elem.zero
	if !was.IsNil() {
		before = was.Elem()
	}
	e.flag(1)
	if e.value(s.Elem, v.Elem(), before) {
		return true
	}
	e.back(start)
	if !was.IsNil() {
		return false
	}
	e.flag(2)
	return true
}

func (e *encoder) list(s *shape, v, was reflect.Value) bool {
	n := v.Len()
	if v.IsNil() {
		if was.IsNil() {
			return false
		}
		e.flag(0)
		return true
	}
	start := len(e.buf)
	differs := was.IsNil() || n != was.Len()
	e.uint(uint64(n) + 1)
	find := finder{shape: s.Elem, in: was}
	turn := 0
	for i := range n {
		elem, before, code := v.Index(i), s.Elem.zero, uint64(1)
		if j := find.like(elem, turn); j >= 0 {
			before, code = was.Index(j), 0
			if j != turn {
				code = 2 + zigzag(int64(j-turn))
			}
			turn = j + 1
		}
		at := len(e.buf)
		e.uint(code<<1 | 1)
		if e.value(s.Elem, elem, before) {
			differs = true
			continue
		}
		e.back(at)
		e.uint(code << 1)
		differs = differs || code != 0
	}
	if !differs {
		e.back(start)
	}
	return differs
}

// finder finds elements of a list again in the list before.
type finder struct {
	shape *shape // of the elements
	in    reflect.Value
	index map[string]int // made once the order differs
}

// like returns the element with the same keys as elem; turn is the likely one. Elements without keys
// are found by position. The result is -1 if there is none.
func (f *finder) like(elem reflect.Value, turn int) int {
	if turn < f.in.Len() && f.same(elem, f.in.Index(turn)) {
		return turn
	}
	if len(f.shape.keys) == 0 || f.in.Len() == 0 {
		return -1
	}
	if f.index == nil {
		f.index = make(map[string]int, f.in.Len())
		for i := range f.in.Len() {
			f.index[f.key(f.in.Index(i))] = i
		}
	}
	if i, ok := f.index[f.key(elem)]; ok {
		return i
	}
	return -1
}

func (f *finder) same(a, b reflect.Value) bool {
	for _, k := range f.shape.keys {
		x, y := a.FieldByIndex(k), b.FieldByIndex(k)
		if x.Kind() == reflect.String && x.String() != y.String() || x.Kind() == reflect.Uint64 && x.Uint() != y.Uint() {
			return false
		}
	}
	return true
}

func (f *finder) key(v reflect.Value) string {
	var b strings.Builder
	for _, k := range f.shape.keys {
		if x := v.FieldByIndex(k); x.Kind() == reflect.String {
			b.WriteString(x.String())
		} else {
			var n [8]byte
			b.Write(binary.BigEndian.AppendUint64(n[:0], x.Uint()))
		}
		b.WriteByte(0)
	}
	return b.String()
}
