package decide

import (
	"fmt"
	"math"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestShare(t *testing.T) {
	c := Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 10_000, WriteIOPS: 5_000, ReadBytes: 400 << 20}}
	for _, x := range []struct {
		f    api.BlockIOFigures
		want float64
	}{
		{api.BlockIOFigures{}, 0},
		{api.BlockIOFigures{ReadIOPS: 1000}, 0.1},
		{api.BlockIOFigures{WriteIOPS: 1000}, 0.2},
		{api.BlockIOFigures{ReadIOPS: 1000, WriteIOPS: 1000}, 0.3},
		{api.BlockIOFigures{WriteIOPS: 1000, WriteBytes: 1 << 30}, 0.2}, // in bytes it is not known
		// 100 MiB/s in 800 requests of 128 KiB: a quarter for the bytes, and 800 bases of 1/10000
		// less 4 KiB's part.
		{api.BlockIOFigures{ReadBytes: 100 << 20}, 0.25 + 800*(1e-4-1.0/102400)},
		{api.BlockIOFigures{ReadBytes: 100 << 20, ReadIOPS: 800}, 0.25 + 800*(1e-4-1.0/102400)},
	} {
		if got, _, _ := c.Share(x.f); math.Abs(got-x.want) > 1e-12 {
			t.Errorf("%+v: share %v, want %v", x.f, got, x.want)
		}
	}
}

func TestAdmit(t *testing.T) {
	c := Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 1000, WriteIOPS: 500}, Headroom: 0.1}
	holders := []Holder{{1, "a", api.BlockIOFigures{ReadIOPS: 100}}, {2, "b", api.BlockIOFigures{ReadIOPS: 300}}}
	for _, x := range []struct {
		c      Capacity
		others []Holder
		want   api.BlockIOFigures
		says   string // "": admitted
	}{
		{c, nil, api.BlockIOFigures{ReadIOPS: 900}, ""},
		{c, nil, api.BlockIOFigures{ReadIOPS: 901}, "/dev/x has 90.0% of its capacity left (900 read or 450 write operations per second), and 90.1% are asked for"},
		{c, holders, api.BlockIOFigures{ReadIOPS: 500}, ""},
		{c, holders, api.BlockIOFigures{ReadIOPS: 400, WriteIOPS: 50}, ""},
		{c, holders, api.BlockIOFigures{ReadIOPS: 400, WriteIOPS: 51}, `has 50.0% of its capacity left (500 read or 250 write operations per second), and 50.2% are asked for; "b" (2) holds 30.0%; "a" (1) holds 10.0%`},
		{Capacity{}, holders, api.BlockIOFigures{ReadIOPS: 1 << 20, WriteBytes: 1}, ""}, // nobody knows
		{c, nil, api.BlockIOFigures{ReadBytes: 4096}, "in bytes per second is not known"},
	} {
		err := Admit("/dev/x", x.c, x.others, x.want)
		testkit.Says(t, fmt.Sprintf("%+v beside %d", x.want, len(x.others)), err, x.says)
	}
}
