package bench

import (
	"math"
	"testing"
)

func TestLoss(t *testing.T) {
	for _, tt := range []struct {
		base    float64
		off, on sample
		want    float64
		ok      bool
	}{
		{1000, sample{work: 900, received: 20000}, sample{work: 890, received: 20100}, 0.01 / 20100, true},
		{1000, sample{work: 900, received: 21000}, sample{work: 890, received: 20000}, 0, false},
		{1000, sample{work: 900, received: 19000}, sample{work: 890, received: 20000}, 0, false},
		{1000, sample{work: 900}, sample{work: 890}, 0, false},
		{0, sample{work: 900, received: 1}, sample{work: 890, received: 1}, 0, false},
	} {
		if got, ok := loss(tt.base, tt.off, tt.on); math.Abs(got-tt.want) > 1e-12 || ok != tt.ok {
			t.Errorf("%+v: %v, %v", tt, got, ok)
		}
	}
}
