package main

import (
	"strings"
	"testing"
)

func TestMarkMask(t *testing.T) {
	for _, tt := range []struct{ in, want, err string }{
		{"0xffff0000", "0xffff0000", ""},
		{"0xffff", "0xffff", ""},
		{"1048560", "0xffff0", ""},
		{"0", "0x0", ""},
		{"0xfff00000", "", "0xfff00000 is not 16 bits in a row"},
		{"0xfffff000", "", "is not 16 bits in a row"},
		{"0xff00ff00", "", "is not 16 bits in a row"},
		{"0xffff00000", "", "32-bit number"},
		{"-1", "", "32-bit number"},
		{"upper", "", "32-bit number"},
	} {
		var m markMask
		err := m.Set(tt.in)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) || m != 0 {
				t.Errorf("%q: %v, %s; want %q", tt.in, err, &m, tt.err)
			}
		} else if err != nil || m.String() != tt.want {
			t.Errorf("%q: %s, %v; want %s", tt.in, &m, err, tt.want)
		}
	}
}

func FuzzMarkMask(f *testing.F) {
	f.Add("0xffff0000")
	f.Add("0b1")
	f.Fuzz(func(t *testing.T, s string) {
		var m, again markMask
		if m.Set(s) != nil {
			return
		}
		if err := again.Set(m.String()); err != nil || again != m {
			t.Errorf("%q: %s comes back as %s, %v", s, &m, &again, err)
		}
	})
}
