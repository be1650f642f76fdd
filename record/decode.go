package record

import (
	"encoding/binary"
	"errors"
	"math"
	"reflect"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// maxMemory bounds what one frame of a recording may take in memory beyond the frame before.
const maxMemory = 64 << 20

var errDelta = errors.New("not what a frame consists of")

// decoder is the reverse of encoder. A frame shares with the one before what has not changed.
type decoder struct {
	shape *shape // as bound to api.Frame; nil: none was read
	last  api.Frame
	keyed bool // last is a frame of this recording
	buf   []byte
	room  int
}

// decode returns the frame of a delta. After an error, only a frame that is written against none can
// be decoded.
func (d *decoder) decode(delta []byte, key bool) (api.Frame, error) {
	if d.shape == nil || !key && !d.keyed {
		return api.Frame{}, errDelta
	}
	f := d.last
	if key {
		f = api.Frame{}
	}
	d.keyed = false
	d.buf, d.room = delta, maxMemory
	if len(delta) > 0 {
		if err := d.value(d.shape, reflect.ValueOf(&f).Elem()); err != nil {
			return api.Frame{}, err
		}
	}
	if len(d.buf) > 0 {
		return api.Frame{}, errDelta
	}
	d.last, d.keyed = f, true
	return f, nil
}

func (d *decoder) uint() (uint64, error) {
	n, size := binary.Uvarint(d.buf)
	if size <= 0 {
		return 0, errDelta
	}
	d.buf = d.buf[size:]
	return n, nil
}

func (d *decoder) int() (int64, error) {
	n, err := d.uint()
	return unzigzag(n), err
}

func (d *decoder) byte() (byte, error) {
	if len(d.buf) == 0 {
		return 0, errDelta
	}
	b := d.buf[0]
	d.buf = d.buf[1:]
	return b, nil
}

func (d *decoder) text() (string, error) {
	n, err := d.uint()
	if err != nil || n > uint64(len(d.buf)) || !d.take(int(n)) {
		return "", errDelta
	}
	s := string(d.buf[:n])
	d.buf = d.buf[n:]
	return s, nil
}

// take takes memory, and reports whether there is room for it.
func (d *decoder) take(bytes int) bool {
	d.room -= bytes
	return d.room >= 0
}

// value changes v, which is a copy of the value before, by the delta. If v is invalid, value passes
// over the delta. It never writes to memory that the frame before shares.
func (d *decoder) value(s *shape, v reflect.Value) error {
	switch s.Kind {
	case kindBool:
		if v.IsValid() {
			v.SetBool(!v.Bool())
		}
		return nil
	case kindInt:
		n, err := d.int()
		if v.IsValid() {
			v.SetInt(v.Int() + n)
		}
		return err
	case kindUint:
		n, err := d.int()
		if v.IsValid() {
			v.SetUint(v.Uint() + uint64(n))
		}
		return err
	case kindFloat:
		return d.float(v)
	case kindString:
		text, err := d.text()
		if v.IsValid() {
			v.SetString(text)
		}
		return err
	case kindTime:
		return d.time(v)
	case kindMap:
		return d.pairs(v)
	case kindStruct:
		return d.fields(s, v)
	case kindPointer:
		return d.pointer(s, v)
	case kindList:
		return d.list(s, v)
	}
	return errDelta
}

func (d *decoder) float(v reflect.Value) error {
	code, err := d.uint()
	if err != nil {
		return err
	}
	was := 0.0
	if v.IsValid() {
		was = v.Float()
	}
	var f float64
	if code&1 == 0 {
		n, _ := rounded(was)
		f = float64(n+unzigzag(code>>1)) / 1e9
	} else {
		diff, err := d.int()
		if err != nil {
			return err
		}
		f = math.Float64frombits(math.Float64bits(was) + uint64(diff))
	}
	if v.IsValid() {
		v.SetFloat(f)
	}
	return nil
}

func (d *decoder) time(v reflect.Value) error {
	code, err := d.byte()
	if err != nil || code > 1 {
		return errDelta
	}
	var t time.Time
	if code == 1 {
		diff, err := d.int()
		if err != nil {
			return err
		}
		before := int64(0)
		if v.IsValid() {
			before, _ = nanoseconds(timeOf(v))
		}
		t = time.Unix(0, before+diff).UTC()
	}
	if v.IsValid() {
		v.Set(reflect.ValueOf(t))
	}
	return nil
}

func (d *decoder) pairs(v reflect.Value) error {
	n, err := d.uint()
	if err != nil || n > uint64(len(d.buf))+1 {
		return errDelta
	}
	var m map[string]string
	if n > 0 {
		m = make(map[string]string)
	}
	for range max(n, 1) - 1 {
		k, err := d.text()
		if err != nil {
			return err
		}
		if m[k], err = d.text(); err != nil {
			return err
		}
		if !d.take(64) { // two headers of strings, and the map's own
			return errDelta
		}
	}
	if v.IsValid() {
		v.Set(reflect.ValueOf(m))
	}
	return nil
}

func (d *decoder) fields(s *shape, v reflect.Value) error {
	size := (len(s.Fields) + 7) / 8
	if len(d.buf) < size {
		return errDelta
	}
	mask := d.buf[:size]
	d.buf = d.buf[size:]
	for i := range s.Fields {
		if mask[i/8]&(1<<(i%8)) == 0 {
			continue
		}
		f, of := &s.Fields[i], reflect.Value{}
		if v.IsValid() && f.index != nil {
			of = v.FieldByIndex(f.index)
		}
		if err := d.value(f.Shape, of); err != nil {
			return err
		}
	}
	return nil
}

func (d *decoder) pointer(s *shape, v reflect.Value) error {
	code, err := d.byte()
	if err != nil || code > 2 {
		return errDelta
	}
	var to reflect.Value
	if v.IsValid() && code > 0 {
		if !d.take(int(s.Elem.zero.Type().Size())) {
			return errDelta
		}
		to = reflect.New(s.Elem.zero.Type())
		if !v.IsNil() {
			to.Elem().Set(v.Elem())
		}
	}
	if code == 1 {
		of := reflect.Value{}
		if to.IsValid() {
			of = to.Elem()
		}
		if err := d.value(s.Elem, of); err != nil {
			return err
		}
	}
	if v.IsValid() {
		if code == 0 {
			to = reflect.Zero(v.Type())
		}
		v.Set(to)
	}
	return nil
}

func (d *decoder) list(s *shape, v reflect.Value) error {
	n, err := d.uint()
	if err != nil || n > uint64(len(d.buf))+1 {
		return errDelta
	}
	var out reflect.Value
	if v.IsValid() {
		out = reflect.Zero(v.Type())
		if n > 0 {
			if !d.take(int(n-1) * int(s.Elem.zero.Type().Size())) {
				return errDelta
			}
			out = reflect.MakeSlice(v.Type(), int(n-1), int(n-1))
		}
	}
	turn := int64(0)
	for i := range max(n, 1) - 1 {
		code, err := d.uint()
		if err != nil {
			return err
		}
		of := reflect.Value{}
		if v.IsValid() {
			of = out.Index(int(i))
		}
		if which := code >> 1; which != 1 {
			if which > 1 {
				turn += unzigzag(which - 2)
			}
			if v.IsValid() {
				if turn < 0 || turn >= int64(v.Len()) {
					return errDelta
				}
				of.Set(v.Index(int(turn)))
			}
			turn++
		}
		if code&1 == 1 {
			if err := d.value(s.Elem, of); err != nil {
				return err
			}
		}
	}
	if v.IsValid() {
		v.Set(out)
	}
	return nil
}
