package netdev

import (
	"slices"
	"testing"
)

func TestCPUMask(t *testing.T) {
	for _, c := range []struct {
		cpus []int
		like string
		want string
	}{
		{[]int{1}, "0", "2"},
		{[]int{0, 1, 5}, "ff", "23"},
		{[]int{0, 32, 39}, "00,00000000", "81,00000001"},
		{nil, "ff,ffffffff", "00,00000000"},
		{[]int{2, 64}, "f", "4"}, // there is no CPU 64
	} {
		got := CPUMask(c.cpus, c.like)
		if got != c.want {
			t.Errorf("CPUMask(%v, %q) = %q, want %q", c.cpus, c.like, got, c.want)
		}
		if back, err := MaskCPUs(got); err != nil || c.like != "f" && !slices.Equal(back, c.cpus) {
			t.Errorf("%q: %v, %v", got, back, err)
		}
	}
}
