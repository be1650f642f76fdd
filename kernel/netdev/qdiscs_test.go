package netdev

import (
	"encoding/binary"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The kernel also notifies of a qdisc that is only asked for: no change.
func TestQdiscAskedFor(t *testing.T) {
	var q qdiscs
	message := func(typ uint16, handle uint32, kind string) syscall.NetlinkMessage {
		b := make([]byte, 20)
		binary.NativeEndian.PutUint32(b[4:], 7)
		binary.NativeEndian.PutUint32(b[8:], handle)
		binary.NativeEndian.PutUint32(b[12:], 0xffffffff)
		b = binary.NativeEndian.AppendUint16(b, uint16(4+len(kind)+1))
		b = binary.NativeEndian.AppendUint16(b, unix.TCA_KIND)
		b = append(append(b, kind...), 0)
		return syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: typ}, Data: b}
	}
	for i, c := range []struct {
		message syscall.NetlinkMessage
		want    bool
	}{
		{message(unix.RTM_NEWQDISC, 0, "noqueue"), true},
		{message(unix.RTM_NEWQDISC, 0, "noqueue"), false},
		{message(unix.RTM_NEWQDISC, 0x10000, "htb"), true},
		{message(unix.RTM_NEWQDISC, 0x10000, "htb"), false},
		{message(unix.RTM_NEWQDISC, 0x20000, "htb"), true},
		{message(unix.RTM_DELQDISC, 0x20000, "htb"), true},
		{message(unix.RTM_NEWQDISC, 0x20000, "htb"), true},
		{syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: unix.RTM_NEWQDISC}, Data: make([]byte, 8)}, true},
	} {
		if got := q.hear(c.message); got != c.want {
			t.Errorf("message %d: change: %t", i, got)
		}
	}
}
