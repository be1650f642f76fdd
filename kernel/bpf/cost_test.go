package bpf

import (
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
)

// The runs of a program in the window are counted and timed, those before are not.
func TestCosts(t *testing.T) {
	o := open(t, nil, nil)
	var objs struct {
		One *ebpf.Program `ebpf:"fl_one"`
	}
	must(t, o.Load(&objs, nil))
	defer objs.One.Close()
	find := func() (c Cost) {
		all, err := Costs(t.Context(), 10*time.Millisecond)
		must(t, err)
		if i := slices.IndexFunc(all, func(c Cost) bool { return c.Program == "fl_one" }); i >= 0 {
			c = all[i]
		}
		return c
	}
	ended := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-ended:
				return
			default:
				run(t, objs.One)
			}
		}
	}()
	busy := find()
	for busy.Runs == 0 { // nothing ran in that window
		busy = find()
	}
	close(ended)
	<-done
	if idle := find(); busy.Copies < 1 || busy.Runs == 0 || busy.Time <= 0 || idle.Runs != 0 {
		t.Errorf("%+v while it runs, %+v after", busy, idle)
	}
}
