package blockio

import "testing"

func TestNamedDisks(t *testing.T) {
	for _, tt := range []struct {
		in   []string
		want string // "" is an error
	}{
		{[]string{"data=/dev/vdb"}, "data=/dev/vdb"},
		{[]string{"log=/dev/vdc, data=/dev/vdb", "x-1=/dev/disk/by-id/y"}, "data=/dev/vdb,log=/dev/vdc,x-1=/dev/disk/by-id/y"},
		{[]string{"data"}, ""},
		{[]string{"=/dev/vdb"}, ""},
		{[]string{"Data=/dev/vdb"}, ""},
		{[]string{"data=vdb"}, ""},
		{[]string{"data=/dev/vdb", "data=/dev/vdc"}, ""},
		{[]string{"data=/dev/vdb,log=/dev/vdb"}, ""},
	} {
		var d namedDisks
		var err error
		for _, s := range tt.in {
			if err == nil {
				err = d.Set(s)
			}
		}
		if (err != nil) != (tt.want == "") || err == nil && d.String() != tt.want {
			t.Errorf("%q: %q, %v", tt.in, d.String(), err)
		}
	}
}
