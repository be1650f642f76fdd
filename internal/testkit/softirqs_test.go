package testkit

import (
	"net"
	"testing"
	"time"
)

// TestSoftirqs expects a call of the programs for each softirq that handles packets on loopback,
// except for softirqs that interrupt init on a kernel that hides these from programs.
func TestSoftirqs(t *testing.T) {
	NeedRoot(t)
	s := WatchSoftirqs(t)
	before := s.calls()
	to, err := net.ListenPacket("udp", "127.0.0.1:0")
	Must(t, err)
	defer to.Close()
	from, err := net.Dial("udp", to.LocalAddr().String())
	Must(t, err)
	defer from.Close()
	for range 100 {
		_, err := from.Write(make([]byte, 10))
		Must(t, err)
		_, _, err = to.ReadFrom(make([]byte, 10))
		Must(t, err)
	}
	time.Sleep(time.Millisecond)
	if calls, missed := uint64(s.calls()-before), s.Missed(); calls+missed < 1 {
		t.Errorf("100 packets brought %d calls, and %d softirqs without", calls, missed)
	}
	// A softirq without a call shows as a difference.
	s.begin -= 7
	if missed := s.Missed(); missed < 7 {
		t.Errorf("of 7 softirqs that no program was called for %d are known", missed)
	}
}
