package rig

import (
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
	time.Sleep(100 * time.Millisecond) // the buffers are read every ten
	read, err := f.Close()
	if err != nil || read == 0 {
		t.Errorf("%d bytes were read: %v", read, err)
	}
	if _, err := NewFtrace("net/no_such_event"); err == nil {
		t.Error("an event that does not exist is recorded")
	}
	if names := instances(t); len(names) != 0 {
		t.Errorf("instances are left: %v", names)
	}
}

// instances lists the instances of tracefs.
func instances(t *testing.T) []string {
	t.Helper()
	fs, err := openTracefs()
	must(t, err)
	defer unix.Close(fs)
	fd, err := unix.Openat(fs, "instances", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	dir := os.NewFile(uintptr(fd), "instances")
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	must(t, err)
	return names
}
