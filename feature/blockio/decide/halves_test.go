package decide

import (
	"testing"

	"github.com/fairlead-project/fairlead/api"
)

// What is offered as reads and what is offered as writes can be reserved together.
func TestHalves(t *testing.T) {
	c := Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 20001, WriteIOPS: 9999}, Headroom: 0.1}
	got, known := c.Halves()
	if want := (api.BlockIOFigures{ReadIOPS: 9000, WriteIOPS: 4499}); got != want || !known {
		t.Errorf("%+v, %v, want %+v", got, known, want)
	}
	if err := Admit("/dev/vdb", c, nil, got); err != nil {
		t.Error(err)
	}
	got.ReadIOPS += 10
	if Admit("/dev/vdb", c, nil, got) == nil {
		t.Error("more than was offered is admitted")
	}
	if _, known := (Capacity{}).Halves(); known {
		t.Error("a capacity that nobody measured is known")
	}
}
