package view

import "testing"

func TestScale(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 999: "999", 999.6: "1.00k", 1234: "1.23k", 99_960: "100k", 123_456: "123k", 999_600: "1.00M", 1e9: "1.00G", 9.99e12: "9.99T"} {
		if got := Scale(v); got != want {
			t.Errorf("%v is %s, want %s", v, got, want)
		}
	}
}
