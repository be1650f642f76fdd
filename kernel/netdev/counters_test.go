package netdev_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// packets sends n frames of so many bytes, header included, by a device.
func packets(t *testing.T, from *netdev.NS, index, n, size int) {
	t.Helper()
	must(t, from.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for range n {
			if err := unix.Sendto(fd, make([]byte, size), 0, &unix.SockaddrLinklayer{Ifindex: index}); err != nil {
				return err
			}
		}
		return nil
	}))
}

// What passes a veth is counted at its other end, to the byte: read over one socket or over many.
func TestCounters(t *testing.T) {
	testkit.OnKernels(t)
	p := newPair(t)
	again, err := p.host.Counting()
	must(t, err)
	defer again.Close()
	const size, n, others = 1000, 50, 10000 // bytes of IPv6 itself
	read := func() netdev.Counters {
		t.Helper()
		all, err := p.host.AllCounters(netdev.MostLinks)
		must(t, err)
		same, err := again.Read(netdev.MostLinks)
		if more := same[p.h0].RxBytes - all[p.h0].RxBytes; err != nil || more > others {
			t.Fatalf("%+v, %v over a socket that stays, %+v over another", same[p.h0], err, all[p.h0])
		}
		return all[p.h0]
	}
	was := read()
	packets(t, p.inside, p.eth0, n, size)
	packets(t, p.host, p.h0, 2*n, size)
	now := read()
	if got, sent := now.RxBytes-was.RxBytes, now.TxBytes-was.TxBytes; got < n*size || sent < 2*n*size || got > n*size+others || sent > 2*n*size+others {
		t.Errorf("%d bytes received and %d sent, want %d and %d", got, sent, n*size, 2*n*size)
	}
	testkit.Is(t, "most 0", testkit.Err(p.host.AllCounters(0)), netdev.ErrMany)
}
