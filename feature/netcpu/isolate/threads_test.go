package isolate

import "testing"

// Before 6.8 threads of a device are identified by name, and a container can give its device a name
// with which its threads' names begin alike.
func TestPollsFor(t *testing.T) {
	for comm, want := range map[string]bool{
		"napi/eth0-8193": true, "napi/eth0-1-8193": false, "napi/eth0-x-8193": false, "napi/eth0--8193": false,
		"napi/eth0-": false, "napi/et": false,
	} {
		if got := pollsFor(comm, "napi/eth0-"); got != want {
			t.Errorf("%s polls for eth0: %v", comm, got)
		}
	}
}
