package load

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

var must = testkit.Must

func TestMain(m *testing.M) {
	if status, ok := Reexec(os.Args); ok {
		os.Exit(status)
	}
	testkit.Main(m)
}

// running is a generator that ends with its test.
type running struct {
	*Board
	t    *testing.T
	cmd  *exec.Cmd
	out  bytes.Buffer
	done chan struct{}
}

// start runs a generator in ns, or in this process's namespace where ns is nil.
func start(t *testing.T, ns *testkit.NS, args ...string) *running {
	t.Helper()
	cmd, board, err := Command(args...)
	must(t, err)
	r := &running{Board: board, t: t, cmd: cmd, done: make(chan struct{})}
	cmd.Stdout = &r.out
	in := func(do func() error) error { return do() }
	if ns != nil {
		in = ns.Do
	}
	must(t, in(cmd.Start))
	go func() {
		cmd.Wait()
		close(r.done)
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-r.done
		board.Close()
	})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	must(t, Await(ctx, r.done, board.Ready))
	return r
}

// counts reports whether the board counts ops within the test's patience.
func (r *running) counts() bool {
	before := r.Read()
	for range 1000 {
		if r.Read().Since(before).Ops > 0 {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

// all returns the counts of a generator with --count, which should reach ops.
func (r *running) all(ops uint64) page {
	testkit.AwaitNone(r.t, func() string {
		if n := r.Read().page.ops; n < ops {
			return fmt.Sprintf("%d are counted, want %d", n, ops)
		}
		return ""
	})
	time.Sleep(20 * time.Millisecond) // lets a generator that does not stop exceed ops
	return r.Read().page
}

func TestUDP(t *testing.T) {
	ns := testkit.NetNS(t)
	recv := start(t, ns, "udp-recv", "--listen", ":9000", "--buffer", "4000000")
	send := start(t, ns, "udp-send", "--to", "127.0.0.1:9000", "--size", "100", "--rate", "0")

	before := send.Read()
	time.Sleep(20 * time.Millisecond)
	if w := send.Read().Since(before); w.Ops != 0 {
		t.Errorf("a paused sender sent %d", w.Ops)
	}
	send.SetRate(1000)
	if !send.counts() || !recv.counts() {
		t.Fatal("nothing sent, or nothing received")
	}
	send.SetRate(0)
	time.Sleep(50 * time.Millisecond)
	s, r := send.Read(), recv.Read()
	if r.page.ops > s.page.ops || r.page.bytes != 100*r.page.ops {
		t.Errorf("sent %d, received %d of %d bytes in all", s.page.ops, r.page.ops, r.page.bytes)
	}
}

// TestCount checks that a sender with --count sends that many, and then no more.
func TestCount(t *testing.T) {
	ns := testkit.NetNS(t)
	const each, conns = 30, 2
	for i, c := range []struct {
		server, client []string
		want           uint64 // what the client counts
	}{
		{[]string{"udp-recv"}, []string{"udp-send"}, each},
		{[]string{"tcp-recv"}, []string{"tcp-send", "--conns", "2"}, each * conns},
		{[]string{"rr-server", "--proto", "tcp"}, []string{"rr-client", "--proto", "tcp", "--conns", "2"}, each * conns},
	} {
		port := 9000 + i // the earlier servers still listen
		start(t, ns, append(c.server, "--listen", fmt.Sprintf(":%d", port), "--buffer", "4000000")...)
		send := start(t, ns, append(c.client, "--to", fmt.Sprintf("127.0.0.1:%d", port), "--count", fmt.Sprint(each))...)
		if n := send.all(c.want).ops; n != c.want {
			t.Errorf("%v: %d were sent, want %d", c.client, n, c.want)
		}
	}
}

// TestSuperPackets checks that both ends count a super-packet as the requested number of datagrams.
func TestSuperPackets(t *testing.T) {
	ns := testkit.NetNS(t)
	recv := start(t, ns, "udp-recv", "--listen", ":9000", "--buffer", "4000000")
	send := start(t, ns, "udp-send", "--to", "127.0.0.1:9000", "--size", "1000", "--segments", "20", "--rate", "2000")
	if !send.counts() || !recv.counts() {
		t.Fatal("nothing sent, or nothing received")
	}
	send.SetRate(0)
	time.Sleep(50 * time.Millisecond)
	s, r := send.Read(), recv.Read()
	if s.page.ops%20 != 0 || s.page.bytes != 1000*s.page.ops || r.page.ops > s.page.ops || r.page.bytes != 1000*r.page.ops {
		t.Errorf("sent %d of %d bytes in all, received %d of %d", s.page.ops, s.page.bytes, r.page.ops, r.page.bytes)
	}
}

func TestCongestion(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	testkit.Fails(t, "pigeons control congestion", testkit.Err(dial("tcp", l.Addr().String(), congestion("pigeon"))), "pigeon")
	c, err := dial("tcp", l.Addr().String(), congestion("reno"))
	must(t, err)
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	must(t, err)
	var got string
	raw.Control(func(fd uintptr) { got, err = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION) })
	if err != nil || strings.TrimRight(got, "\x00") != "reno" {
		t.Errorf("congestion control is %q (%v)", got, err)
	}
}

// TestDialogues runs each protocol against a server that implements just enough of it.
func TestDialogues(t *testing.T) {
	x := strings.Repeat("x", 10)
	message := func(kind byte, body string) string {
		return string(binary.BigEndian.AppendUint32([]byte{kind}, uint32(4+len(body)))) + body
	}
	ready := message('Z', "I")
	type exchanged struct{ asks, answers string }
	for name, talk := range map[string][]exchanged{
		"memcached": {{"set fairlead 0 0 10\r\n" + x + "\r\n", "STORED\r\n"}, {"get fairlead\r\n", "VALUE fairlead 0 10\r\n" + x + "\r\nEND\r\n"}},
		"redis": {{"*3\r\n$3\r\nSET\r\n$8\r\nfairlead\r\n$10\r\n" + x + "\r\n", "+OK\r\n"},
			{"*2\r\n$3\r\nGET\r\n$8\r\nfairlead\r\n", "$10\r\n" + x + "\r\n"}},
		"http": {{"GET /10 HTTP/1.1\r\nHost: fairlead\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + x}},
		"postgres": {{"\x00\x00\x00\x29\x00\x03\x00\x00user\x00postgres\x00database\x00postgres\x00\x00", message('R', "\x00\x00\x00\x00") + ready},
			{message('Q', "SELECT repeat('x', 10)\x00"), message('D', x) + ready}},
	} {
		for _, fault := range []string{"", "cut", "refused"} {
			client, server := net.Pipe()
			go func() {
				defer server.Close()
				for _, e := range talk {
					got := make([]byte, len(e.asks))
					if _, err := io.ReadFull(server, got); err != nil || string(got) != e.asks {
						t.Errorf("%s asks %q, want %q (%v)", name, got, e.asks, err)
						return
					}
					switch fault {
					case "cut":
						return
					case "refused":
						e.answers = "E\x00\x00\x00\x09 none\r\n\r\n\r\n"
					}
					if _, err := io.WriteString(server, e.answers); err != nil || fault != "" {
						return
					}
				}
			}()
			request, answer, err := protocols()[name].converse(client, len(x))
			last := talk[len(talk)-1]
			switch {
			case fault != "" && err == nil:
				t.Errorf("%s, %s: no error", name, fault)
			case fault == "" && (err != nil || string(request) != last.asks || answer != len(last.answers)):
				t.Errorf("%s: %q with answers of %d, %v; want %q of %d", name, request, answer, err, last.asks, len(last.answers))
			}
			client.Close()
		}
	}
}

func TestNice(t *testing.T) {
	ns := testkit.NetNS(t)
	r := start(t, ns, "burn", "--nice", "5")
	// All threads, including the ones that the runtime starts later.
	stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", r.cmd.Process.Pid))
	if err != nil || len(stats) == 0 {
		t.Fatalf("no threads (%v)", err)
	}
	for _, path := range stats {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // ended
		}
		f := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
		testkit.Same(t, fmt.Sprintf("%s: nice value", path), "5", f[16])
	}
	auto, err := os.ReadFile(fmt.Sprintf("/proc/%d/autogroup", r.cmd.Process.Pid))
	if err == nil && !strings.HasSuffix(strings.TrimSpace(string(auto)), "nice 5") {
		t.Errorf("the session's group is %q", auto)
	}
}

func TestLines(t *testing.T) {
	out, in := io.Pipe()
	end := make(chan struct{})
	defer close(end)
	run := func(_ options, b *Board) error { b.count(1, 0); <-end; return nil }
	ended := make(chan error, 1)
	go func() {
		ended <- options{every: time.Millisecond}.loop(generator{run: run}, &Board{page: new(page)}, json.NewEncoder(in))
	}()
	var l line
	lines, sum := json.NewDecoder(out), uint64(0)
	for ; sum == 0; sum += l.Ops {
		if must(t, lines.Decode(&l)); l.Total {
			t.Fatal("the total comes first")
		}
	}
	must(t, unix.Kill(unix.Getpid(), unix.SIGTERM))
	for !l.Total {
		must(t, lines.Decode(&l))
	}
	if must(t, <-ended); l.Ops != sum {
		t.Errorf("the total is %+v after %d ops", l, sum)
	}
}

func TestUsage(t *testing.T) {
	tests := []struct {
		args string
		says string
	}{
		{"", "usage:"},
		{"nothing", "usage:"},
		{"burn extra", "too many arguments"},
		{"udp-send --rate fast", "want a number of packets per second, or flood"},
		{"udp-send --size 0", "--size"},
		{"udp-send --segments 0", "--segments"},
		{"udp-send --size 1400 --segments 60", "65507 bytes"},
		{"tcp-send --conns 0", "--conns"},
		{"rr-client --proto sctp", "--proto"},
	}
	for _, tt := range tests {
		var stdout, stderr bytes.Buffer
		if got := Main(strings.Fields(tt.args), &stdout, &stderr); got != 2 || !strings.Contains(stderr.String(), tt.says) {
			t.Errorf("load %s: status %d, %q", tt.args, got, &stderr)
		}
	}
	var stdout, stderr bytes.Buffer
	if got := Main([]string{"udp-send", "--to", "nowhere"}, &stdout, &stderr); got != 1 || !strings.Contains(stderr.String(), "nowhere") {
		t.Errorf("bad address: status %d, %q", got, &stderr)
	}
}

// TestPacer runs the pacer against a simulated clock.
func TestPacer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.Uint64Range(1000, 1_000_000).Draw(t, "rate")
		now := time.Unix(1, 0)
		var p pacer
		var sent uint64
		start := now
		for now.Sub(start) < 100*time.Millisecond {
			n := p.due(rate, now)
			if n > batch {
				t.Fatalf("%d due at once", n)
			}
			sent += uint64(n)
			p.sent += uint64(n)
			// A call takes a while, and longer the more it sends.
			now = now.Add(time.Duration(200+n*500) * time.Nanosecond)
		}
		want := float64(rate) * now.Sub(start).Seconds()
		if got := float64(sent); got < want*0.99-1 || got > want*1.01+1 {
			t.Fatalf("rate %d: sent %v, want %v", rate, got, want)
		}
		// After a pause of a second the pacer catches up on catchUp only.
		now = now.Add(time.Second)
		var burst uint64
		for {
			n := p.due(rate, now)
			if n == 0 {
				break
			}
			p.sent += uint64(n)
			burst += uint64(n)
		}
		if limit := uint64(catchUp.Seconds()*float64(rate)) + 3; burst > limit {
			t.Fatalf("rate %d: a burst of %d after a pause, want %d at most", rate, burst, limit)
		}
	})
}

func TestLatency(t *testing.T) {
	b := &Board{page: new(page)}
	before := b.Read()
	testkit.Same(t, "no latencies have the median", 0, b.Read().Since(before).Latency(0.5))
	b.latency(time.Hour)
	before = b.Read()
	for ns := range 16 {
		b.latency(time.Duration(ns))
	}
	w := b.Read().Since(before)
	for q, want := range map[float64]time.Duration{0: 0, 0.5: 7, 1: 15} {
		if got := w.Latency(q); got != want {
			t.Errorf("quantile %v is %d, want %d", q, got, want)
		}
	}
}

func TestDisk(t *testing.T) {
	file := filepath.Join(t.TempDir(), "scratch")
	must(t, os.WriteFile(file, make([]byte, 1<<20), 0o600))
	const count, conns = 6, 2
	r := start(t, nil, "disk", "--to", file, "--size", "4096", "--also", "65536", "--conns", "2", "--count", "6", "--sequential", "all", "--writes", "50")
	if got := r.all(count * conns); got.ops != count*conns || got.bytes != count*conns/2*(4096+65536) {
		t.Errorf("%d operations of %d bytes, want %d, half of 4096 and half of 65536", got.ops, got.bytes, count*conns)
	}
	for name, o := range map[string]options{
		"odd": {to: file, size: 5000, conns: 1}, "also odd": {to: file, size: 4096, also: 1, conns: 1},
		"no file": {to: file + "/none", size: 4096, conns: 1}, "short": {to: file, size: 4096, also: 2 << 20, conns: 1},
	} {
		testkit.Fails(t, fmt.Sprintf("%s is taken", name), disk(o, &Board{page: new(page)}))
	}
}

func TestMail(t *testing.T) {
	box := t.TempDir()
	if !start(t, nil, "mail", "--to", box, "--size", "4096", "--conns", "4").counts() {
		t.Error("no mail is delivered")
	}
	if err := mail(options{to: box + "/none", size: 4096, conns: 1}, &Board{page: new(page)}); err == nil {
		t.Error("mail without a directory is taken")
	}
	if _, err := exec.LookPath("sqlite3"); err == nil && !start(t, nil, "sqlite", "--to", box).counts() {
		t.Error("no transaction is committed")
	}
}
