package rig

import (
	"net"
	"os"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestFtrace checks that a recording can be read, and leaves nothing behind.
func TestFtrace(t *testing.T) {
	testkit.NeedRoot(t)
	f, err := NewFtrace("net/net_dev_queue", "net/netif_receive_skb")
	must(t, err)
	c, err := net.Dial("udp", "127.0.0.1:9")
	must(t, err)
	for range 1000 {
		c.Write([]byte("x")) // mostly refused: no socket listens
	}
	c.Close()
	read, err := f.Close()
	if err != nil || read == 0 {
		t.Errorf("%d bytes were read: %v", read, err)
	}
	if _, err := NewFtrace("net/no_such_event"); err == nil {
		t.Error("an event that does not exist is recorded")
	}
	fs, err := openTracefs()
	must(t, err)
	defer fs.Close()
	left, err := os.ReadDir(instances(fs))
	if err != nil || len(left) != 0 {
		t.Errorf("instances are left: %v (%v)", left, err)
	}
}
