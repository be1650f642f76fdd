package latency

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

const (
	appArg   = "-latency-app"
	appPause = 200 * time.Millisecond // between the application's part and the kernel's
)

// appReexec is an application that has its bytes wait for it: as many requests as args say,
// each of one byte, over one connection. A server reads each request only a while after it
// has come; a client writes each reply's answer a while before it lets it go.
func appReexec(args []string) (status int, ok bool) {
	if len(args) != 5 || args[1] != appArg {
		return 0, false
	}
	n, _ := strconv.Atoi(args[4])
	if err := map[string]func(string, int) error{"server": slowServer, "corked": corkedClient, "datagrams": sendDatagrams}[args[2]](args[3], n); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1, true
	}
	return 0, true
}

func address(to string) unix.Sockaddr {
	a := netip.MustParseAddrPort(to)
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

// slowServer reads one byte n times, each a while after it has seen it arrive.
func slowServer(at string, n int) error {
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	if err := unix.Bind(l, address(at)); err != nil {
		return err
	}
	if err := unix.Listen(l, 1); err != nil {
		return err
	}
	c, _, err := unix.Accept(l)
	if err != nil {
		return err
	}
	b := make([]byte, 1)
	for range n {
		ready := []unix.PollFd{{Fd: int32(c), Events: unix.POLLIN}}
		for _, err := unix.Poll(ready, -1); err != nil; _, err = unix.Poll(ready, -1) {
			if err != unix.EINTR { // the runtime's signal to a thread that runs for long
				return err
			}
		}
		time.Sleep(appPause)
		if _, err := unix.Read(c, b); err != nil {
			return err
		}
		if _, err := unix.Write(c, b); err != nil {
			return err
		}
	}
	unix.Read(c, b) // until the other end closes
	return nil
}

// corkedClient writes a byte, lets it go a while later by what is no call that sends, and
// waits for the reply; n times.
func corkedClient(to string, n int) error {
	c, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	for end := time.Now().Add(90 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if err = unix.Connect(c, address(to)); err == nil {
			break
		}
		if time.Now().After(end) {
			return err
		}
	}
	b := make([]byte, 1)
	for range n {
		if err := unix.SetsockoptInt(c, unix.IPPROTO_TCP, unix.TCP_CORK, 1); err != nil {
			return err
		}
		if _, err := unix.Write(c, b); err != nil {
			return err
		}
		time.Sleep(appPause / 2) // the kernel holds no byte back for more than 200 ms
		if err := unix.SetsockoptInt(c, unix.IPPROTO_TCP, unix.TCP_CORK, 0); err != nil {
			return err
		}
		if _, err := unix.Read(c, b); err != nil {
			return err
		}
	}
	return nil
}

// sendDatagrams sends n datagrams; the first may wait for the neighbour's address.
func sendDatagrams(to string, n int) error {
	c, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	for range n {
		if err := unix.Sendto(c, []byte("datagram"), 0, address(to)); err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}

// app starts the application in a box.
func (h *host) app(b *sandbox.Box, what, addr string, n int) *sandbox.Process {
	h.T.Helper()
	cmd := exec.Command("/proc/self/exe", appArg, what, addr, strconv.Itoa(n))
	cmd.Stderr = os.Stderr
	p, err := b.Start(cmd)
	must(h.T, err)
	h.T.Cleanup(func() { p.Kill(); p.Wait() })
	return p
}

// The time of the application's part shows in mace and in no other: of bytes that wait for
// their reader, of bytes that TCP holds back, and of datagrams.
func TestApplication(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	h := newHost(t)
	h.bridge()
	web, c := h.add("web", "10.66.0.2/24", h.ns)
	other, oc := h.add("other", "10.66.0.3/24", h.ns)
	h.f.cfg.Containers = known{}
	h.measure(true, c, oc)
	collect := func(direction string, filter api.LatencyFilter, n int, is func(api.LatencyRecord) bool) (list []api.LatencyRecord) {
		t.Helper()
		h.await(func() string {
			out, err := h.f.Command(t.Context(), &c, api.Ask{Body: filter, Over: time.Second})
			must(t, err)
			got := out.(api.LatencyRecords)
			filter.After = got.Next
			for _, r := range got.Records {
				if r.Direction == direction && is(r) {
					list = append(list, r)
				}
			}
			if len(list) < n {
				return fmt.Sprintf("%d of %d records; the last of all %+v", len(list), n, got.Records)
			}
			return ""
		})
		return list
	}
	from := func(f api.LatencyFilter) api.LatencyFilter {
		t.Helper()
		out, err := h.f.Command(t.Context(), &c, api.Ask{Body: f})
		must(t, err)
		f.After = out.(api.LatencyRecords).Next
		return f
	}
	const n, most = 3, 20                                                            // of a reader that is held up for a second the time is not known
	data := func(r api.LatencyRecord) bool { return r.Bytes == 53 || r.Bytes == 41 } // a byte, with TCP's timestamps or without

	filter := from(api.LatencyFilter{Protocol: api.LatencyTCP, Port: 9000})
	h.app(web, "server", "10.66.0.2:9000", most)
	h.app(h.wire, "corked", "10.66.0.2:9000", most)
	for _, r := range collect("ingress", filter, n, func(r api.LatencyRecord) bool { return data(r) && r.Mace != nil }) {
		if *r.Mace < appPause.Seconds() || r.Stack == nil || *r.Stack >= *r.Mace {
			t.Errorf("a byte that waits for its reader: %+v", r)
		}
	}

	filter = from(api.LatencyFilter{Protocol: api.LatencyTCP, Port: 9001})
	h.app(h.wire, "server", "10.66.0.1:9001", n)
	h.app(web, "corked", "10.66.0.1:9001", n)
	for _, r := range collect("egress", filter, n, data) {
		if r.Mace == nil || *r.Mace < (appPause/2).Seconds() || r.Stack == nil || *r.Stack >= *r.Mace {
			t.Errorf("a byte that TCP holds back: %+v", r)
		}
	}

	filter = from(api.LatencyFilter{Protocol: api.LatencyUDP, Port: 9002})
	h.app(other, "datagrams", "10.66.0.1:9002", n) // a neighbour's calls are not this one's
	h.app(web, "datagrams", "10.66.0.1:9002", n)
	list := collect("egress", filter, n, func(api.LatencyRecord) bool { return true })
	if !slices.ContainsFunc(list, func(r api.LatencyRecord) bool { return r.Mace != nil }) {
		t.Errorf("no datagram has the time of its call: %+v", list)
	}
	for _, r := range list {
		if r.From != "10.66.0.2" || r.Mace != nil && (r.Stack == nil || *r.Mace < *r.Stack) {
			t.Errorf("a datagram: %+v", r)
		}
	}

	// What comes without a call has no such time: SYN, ACK.
	filter = from(api.LatencyFilter{Protocol: api.LatencyTCP, Port: 9003})
	h.app(h.wire, "server", "10.66.0.1:9003", 1)
	h.app(web, "corked", "10.66.0.1:9003", 1)
	for _, r := range collect("egress", filter, 2, func(r api.LatencyRecord) bool { return !data(r) }) {
		if r.Mace != nil {
			t.Errorf("nobody called for %+v", r)
		}
	}
}
