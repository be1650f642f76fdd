package netdev

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// A namespace may be full of devices: a look ends all the same, and keeps what it saw.
func TestManyLinks(t *testing.T) {
	testkit.InFull(t)
	made := testkit.NetNS(t)
	h := made.Handle(t)
	const devices, addrs = 40, maxAddrs + 20
	for i := range devices {
		must(t, h.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprint("flbr", i)}}))
	}
	for i := range addrs {
		made.Address(t, "lo", fmt.Sprintf("192.0.2.%d/32", i))
	}
	ns := open(t, made.Path)
	for _, c := range []struct {
		most, links int
		many        bool
	}{
		{MostLinks, devices + 1, false},
		{devices + 5, devices + 1, true}, // of addresses
		{devices, devices, true},
	} {
		links, err := ns.Links(c.most)
		if len(links) != c.links || errors.Is(err, ErrMany) != c.many || err != nil && !c.many {
			t.Errorf("at most %d: %d devices, %v", c.most, len(links), err)
		}
		for _, l := range links {
			if len(l.Addrs) > maxAddrs {
				t.Errorf("at most %d: %d addresses of %s", c.most, len(l.Addrs), l.Name)
			}
		}
	}
}

// CAP_NET_ADMIN in a namespace is enough to send to any netlink socket that was opened there.
// Messages that a container sends in the kernel's place are ignored.
func TestForgedDump(t *testing.T) {
	testkit.OnKernels(t)
	made := testkit.NetNS(t)
	var names []string
	err := open(t, made.Path).Do(func() error {
		s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer s.Close()
		port, err := s.GetPid()
		if err != nil {
			return err
		}
		forger, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer unix.Close(forger)
		forged := nl.NewNetlinkRequest(unix.RTM_NEWLINK, 0)
		forged.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		forged.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("forged")))
		end := nl.NewNetlinkRequest(unix.NLMSG_DONE, 0)
		for _, req := range []*nl.NetlinkRequest{forged, end} {
			if err := unix.Sendto(forger, req.Serialize(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: port}); err != nil {
				return os.NewSyscallError("send forged answer", err)
			}
		}
		return dumpBy(s, linksRequest(0), func(msg []byte) (bool, error) {
			l, err := netlink.LinkDeserialize(nil, msg)
			if err == nil {
				names = append(names, l.Attrs().Name)
			}
			return true, err
		})
	})
	if err != nil || len(names) != 1 || names[0] != "lo" {
		t.Errorf("devices %q, %v", names, err)
	}
}

func FuzzParseAddr(f *testing.F) {
	req := func(attrs ...*nl.RtAttr) []byte {
		msg := nl.NewIfAddrmsg(unix.AF_INET)
		msg.Prefixlen = 24
		data := msg.Serialize()
		for _, a := range attrs {
			data = append(data, a.Serialize()...)
		}
		return data
	}
	f.Add(req(nl.NewRtAttr(unix.IFA_ADDRESS, []byte{192, 0, 2, 1}), nl.NewRtAttr(unix.IFA_LOCAL, []byte{192, 0, 2, 1})))
	f.Add(req(nl.NewRtAttr(unix.IFA_ADDRESS, []byte{192, 0, 2, 2}), nl.NewRtAttr(unix.IFA_LOCAL, []byte{192, 0, 2, 1})))
	f.Add(req(nl.NewRtAttr(unix.IFA_ADDRESS, []byte{1})))
	f.Add(req())
	f.Add([]byte{1})
	f.Add(append(req(), 5, 0, unix.IFA_ADDRESS, 0, 1)) // not padded
	f.Fuzz(func(t *testing.T, msg []byte) {
		if _, prefix, err := parseAddr(msg); err != nil && prefix != "" {
			t.Errorf("both %q and %v", prefix, err)
		}
	})
}

func FuzzParseNAPI(f *testing.F) {
	head := genlHeader{1, 2}
	f.Add(head[:])
	f.Add(append(head[:], nl.NewRtAttr(napiID, nl.Uint32Attr(7)).Serialize()...))
	f.Add(append(head[:], 5, 0, napiPID, 0, 1)) // not padded
	f.Add(slices.Concat(head[:], nl.NewRtAttr(napiID, nl.Uint32Attr(7)).Serialize(), []byte{99, 0, napiPID, 0}))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, msg []byte) {
		if n, err := parseNAPI(msg); err != nil && n != (NAPI{}) {
			t.Errorf("both %+v and %v", n, err)
		}
	})
}

func TestMasks(t *testing.T) {
	for _, c := range []struct {
		mask string
		cpus []int
	}{
		{"0", nil}, {"00000000,00000000", nil}, {"1", []int{0}}, {"23", []int{0, 1, 5}}, {"80000000", []int{31}}, {"81,00000001", []int{0, 32, 39}},
		{"00000001,80000002", []int{1, 31, 32}}, {"1,00000000,00000000", []int{64}},
	} {
		testkit.Gives(t, c.mask, c.cpus)(MaskCPUs(c.mask))
		testkit.Same(t, fmt.Sprintf("mask of %v", c.cpus), c.mask, CPUMask(c.cpus, c.mask))
	}
	if got := CPUMask([]int{2, 64}, "f"); got != "4" { // there is no CPU 64
		t.Errorf("mask of CPU 2: %q", got)
	}
	for _, bad := range []string{"", ",", "x", "1,", "-1", "100000000", "0x1", "1 "} {
		testkit.Fails(t, bad, testkit.Err(MaskCPUs(bad)))
	}
}

func FuzzMaskCPUs(f *testing.F) {
	f.Add("00000001,80000002")
	f.Add("ff")
	f.Fuzz(func(t *testing.T, mask string) {
		cpus, err := MaskCPUs(mask)
		if err == nil && !slices.IsSorted(cpus) {
			t.Errorf("%q: %v", mask, cpus)
		}
	})
}
