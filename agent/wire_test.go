package agent

import "testing"

// People read names of devices, and not the numbers of their namespaces.
func TestDevices(t *testing.T) {
	d := Devices{{11, 2}: "eth0 of web", {12, 7}: "veth7"}
	for object, want := range map[string]string{"11/2/gro": "eth0 of web", "12/7": "veth7", "12/7/ingress/fl_x": "veth7", "12/8": "", "11": "", "x/2": "", "/sys/x": "", "17:99": ""} {
		if got := d.of(object); got != want {
			t.Errorf("%s is %q, want %q", object, got, want)
		}
	}
	asked := 0
	find := func() Devices { asked++; return d }
	for text, want := range map[string]string{
		"switch gro of device 2 in netns 11: busy; device 9 in netns 11": "switch gro of eth0 of web: busy; device 9 in netns 11",
		"nothing of the kind": "nothing of the kind",
	} {
		if got := named(text, find); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if asked != 2 {
		t.Errorf("asked %d times", asked)
	}
}
