package verb

import (
	"strings"
	"testing"
)

func TestDevices(t *testing.T) {
	for _, tt := range []struct {
		in        []string
		want, err string
	}{
		{[]string{"eth0"}, "eth0", ""},
		{[]string{"eth1, eth0", "bond0"}, "eth1,eth0,bond0", ""},
		{[]string{""}, "", "not a device name"},
		{[]string{"eth0,"}, "", "not a device name"},
		{[]string{"../eth0"}, "", "not a device name"},
		{[]string{"eth0:1"}, "", "not a device name"},
		{[]string{"abcdefghijklmnop"}, "", "not a device name"},
		{[]string{"eth0,eth0"}, "", "given twice"},
		{[]string{"eth0", "eth1,eth0"}, "", "given twice"},
	} {
		var d Devices
		var err error
		for _, s := range tt.in {
			if err == nil {
				err = d.Set(s)
			}
		}
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%q: %v, want %q", tt.in, err, tt.err)
			}
		} else if err != nil || d.String() != tt.want {
			t.Errorf("%q: %s, %v; want %s", tt.in, d.String(), err, tt.want)
		}
	}
}
