package model

import (
	"fmt"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestFitLink(t *testing.T) {
	for _, c := range []struct {
		link  uint64
		rates []uint64
		want  string
	}{
		{1e9, nil, ""},
		{1e9, []uint64{500e6, 450e6, 0}, ""},
		{1e9, []uint64{500e6, 450e6 + 1}, "guaranteed rates exceed the link: the sum of 2 is 950000001bit, and 95 % of the 1gbit link is 950mbit"},
		{1e9, []uint64{1e9, 0, 50e6}, "guaranteed rates exceed the link: the sum of 2 is 1050mbit, and 95 % of the 1gbit link is 950mbit"},
		{0, []uint64{1}, "guaranteed rates exceed the link: the sum of 1 is 1bit, and 95 % of the 0bit link is 0bit"},
		{1<<64 - 1, []uint64{1<<64 - 1, 1<<64 - 1}, "guaranteed rates exceed the link: the sum of 2 is more than 18446744073709551615bit, and 95 % of the 18446744073709551615bit link is 17524406870024074034bit"},
	} {
		got := ""
		if err := fitLink(c.link, c.rates); err != nil {
			got = err.Error()
		}
		testkit.Same(t, fmt.Sprintf("fitLink(%d, %d)", c.link, c.rates), c.want, got)
	}
}
