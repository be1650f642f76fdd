package decide

import (
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

func TestProfile(t *testing.T) {
	p := Profile{{Budget: 0.1, ReadIOPS: 1000, WriteIOPS: 500}, {Budget: 0.2, ReadIOPS: 900, WriteIOPS: 1000}, {Budget: 0.4, ReadIOPS: 3000, WriteIOPS: 1000}}
	for _, c := range []struct {
		want   api.BlockIOFigures
		budget time.Duration
		says   string
	}{
		{api.BlockIOFigures{ReadIOPS: 1000}, 100 * time.Millisecond, ""},
		{api.BlockIOFigures{ReadIOPS: 500}, 50 * time.Millisecond, ""},
		{api.BlockIOFigures{ReadIOPS: 2000}, 300 * time.Millisecond, ""}, // what was measured with 200 ms is less than with 100
		{api.BlockIOFigures{ReadIOPS: 500, WriteIOPS: 750}, 200 * time.Millisecond, ""},
		{api.BlockIOFigures{ReadBytes: 500 * LargeRequest}, 50 * time.Millisecond, ""},
		{api.BlockIOFigures{ReadIOPS: 3001}, 0, "3000 reads"},
		{api.BlockIOFigures{WriteIOPS: 1001}, 0, "1000 writes"},
		{api.BlockIOFigures{ReadIOPS: 3000, WriteIOPS: 1000}, 0, "together"},
	} {
		got, err := p.Needs(c.want)
		if got != c.budget || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v, %v; want %v %s", c.want, got, err, c.budget, c.says)
		}
	}
	var last time.Duration
	for n := uint64(1); n <= 3000; n++ {
		got, err := p.Needs(api.BlockIOFigures{ReadIOPS: n})
		if err != nil || got < last {
			t.Fatalf("%d reads need %v, one less %v; %v", n, got, last, err)
		}
		last = got
	}
	for _, bad := range []Profile{{{Budget: 0}}, {{Budget: 0.6}}, {{Budget: 0.2}, {Budget: 0.1}}, {{Budget: 0.1, ReadIOPS: maxIOPS + 1}}, make(Profile, maxPoints+1)} {
		if bad.check() == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}
