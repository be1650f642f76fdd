package load

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"golang.org/x/sys/unix"
)

// free returns n unused addresses of loopback.
func free(t *testing.T, proto string, n int) (addrs []string) {
	t.Helper()
	for range n {
		if proto == "udp" {
			c, err := net.ListenPacket("udp", "127.0.0.1:0")
			must(t, err)
			defer c.Close()
			addrs = append(addrs, c.LocalAddr().String())
			continue
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		defer l.Close()
		addrs = append(addrs, l.Addr().String())
	}
	return addrs
}

// TestBlock compares the request counts of clients that block in the kernel, at both ends.
func TestBlock(t *testing.T) {
	const conns, count = 3, 50
	for _, c := range []struct {
		name, proto string
		servers     int
		more        []string
	}{
		{"udp", "udp", conns, nil},
		{"tcp", "tcp", 1, nil},
		{"connect", "tcp", 1, []string{"--connect"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			at := strings.Join(free(t, c.proto, c.servers), ",")
			common := []string{"--proto", c.proto, "--conns", fmt.Sprint(conns)}
			server := start(t, nil, append(append([]string{"rr-server"}, common...), "--listen", at)...)
			client := start(t, nil, append(append([]string{"rr-client"}, common...), append(c.more, "--size", "1", "--count", fmt.Sprint(count), "--to", at)...)...)
			if got := client.all(conns * count); got.ops != conns*count || got.bytes != 2*conns*count || got.errors != 0 {
				t.Errorf("the client counts %d requests, %d bytes, %d errors", got.ops, got.bytes, got.errors)
			}
			if w := client.Read().Since(Reading{}); w.Latency(0.5) <= 0 || w.Latency(0.99) < w.Latency(0.5) {
				t.Errorf("p50 %v, p99 %v", w.Latency(0.5), w.Latency(0.99))
			}
			if got := server.all(conns * count); got.ops != conns*count {
				t.Errorf("the server counts %d", got.ops)
			}
		})
	}
}

// TestStalled stops a server. Each flow counts as stalled exactly once while it gets no answer. No
// flow counts as stalled while the board pauses the client.
func TestStalled(t *testing.T) {
	const conns = 3
	at := free(t, "tcp", 1)[0]
	server := start(t, nil, "rr-server", "--proto", "tcp", "--conns", fmt.Sprint(conns), "--listen", at)
	client := start(t, nil, "rr-client", "--proto", "tcp", "--size", "1", "--conns", fmt.Sprint(conns), "--to", at)
	if !client.counts() {
		t.Fatal("no answer comes")
	}
	before := client.Read()
	must(t, server.cmd.Process.Signal(unix.SIGSTOP))
	testkit.AwaitNone(t, func() string {
		if n := client.Read().Since(before).Stalled; n < conns {
			return fmt.Sprintf("%d flows are stalled, of %d", n, conns)
		}
		return ""
	})
	must(t, server.cmd.Process.Signal(unix.SIGCONT))
	if !client.counts() {
		t.Fatal("no answer comes any more")
	}
}

// TestWatch steps through the ticks of a second by hand.
func TestWatch(t *testing.T) {
	b := &Board{page: new(page)}
	b.SetRate(Flood)
	f, other := new(flow), new(flow)
	flows := []*flow{f, other}
	ticks := func(n int) {
		for range n {
			other.answers.Add(1)
			look(flows, b)
		}
	}
	stalled := func(want uint64, when string) {
		t.Helper()
		if n := b.Read().page.stalls; n != want {
			t.Errorf("%s: %d flows are stalled, want %d", when, n, want)
		}
	}
	ticks(stalledTicks - 1)
	stalled(0, "after less than a second")
	ticks(1)
	stalled(1, "after a second")
	ticks(3 * stalledTicks)
	stalled(1, "after four, still the same one")
	f.answers.Add(1)
	ticks(stalledTicks)
	stalled(1, "within the second after an answer")
	ticks(1)
	stalled(2, "after that second")
	f.answers.Add(1)
	b.SetRate(0)
	ticks(2 * stalledTicks)
	b.SetRate(Flood)
	ticks(stalledTicks - 1)
	stalled(2, "after a pause")
	f.done.Store(true)
	ticks(2 * stalledTicks)
	stalled(2, "with all requests made")
}

// TestGreet counts a greeting and the datagrams after it. Without an answer to the greeting none
// follow.
func TestGreet(t *testing.T) {
	const count = 30
	at := free(t, "udp", 1)[0]
	args := []string{"udp-send", "--greet", "--size", "100", "--count", fmt.Sprint(count), "--to", at}
	server := start(t, nil, "udp-recv", "--greet", "--listen", at, "--buffer", "4000000")
	client := start(t, nil, args...)
	if got := client.all(count); got.ops != count {
		t.Errorf("%d datagrams were sent, want %d", got.ops, count)
	}
	if got := server.all(count + 1); got.ops < count+1 || got.bytes != 100*count+greeting*(got.ops-count) {
		t.Errorf("%d datagrams of %d bytes came", got.ops, got.bytes)
	}
}
