package load

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A client and a server have a thread for each connection that blocks in the kernel, like netperf's
// processes. Go's poller would take more time for a request than the kernel's network stack.

// Lost is the time after which a client without --count counts an unanswered UDP request as an error
// and asks again.
const Lost = 200 * time.Millisecond

// spare is the number of threads for Go code in addition to the connections' threads.
const spare = 4

// flow is one connection of a client that blocks in the kernel.
type flow struct {
	answers atomic.Uint64
	done    atomic.Bool // it has made all its requests
	seen    uint64      // answers that watch has seen
	quiet   int         // ticks of watch without an answer
}

// watchTick is the interval of watch. A flow without an answer for stalledTicks, a second, is
// stalled.
const (
	watchTick    = 100 * time.Millisecond
	stalledTicks = int(time.Second / watchTick)
)

// watch counts the flows without an answer for a second. It counts each stall once, until the flow
// gets an answer. No time passes while the board pauses the client.
func watch(flows []*flow, b *Board) {
	for range time.Tick(watchTick) {
		look(flows, b)
	}
}

// look is one tick of watch.
func look(flows []*flow, b *Board) {
	idle := b.rate() == 0
	for _, f := range flows {
		n := f.answers.Load()
		if idle || n != f.seen || f.done.Load() {
			f.seen, f.quiet = n, 0
			continue
		}
		if f.quiet++; f.quiet == stalledTicks {
			b.stall()
		}
	}
}

// rrClient keeps one request in flight on each connection, or opens a new connection for each request
// if o.connect is set.
func rrClient(o options, b *Board) error {
	runtime.GOMAXPROCS(o.conns + spare)
	failed := make(chan error, o.conns)
	targets := o.targets()
	speaks := protocols()[o.proto]
	var flows []*flow
	for i := range o.conns {
		f := new(flow)
		flows = append(flows, f)
		to := targets[i%len(targets)]
		if o.connect {
			addr, err := netip.ParseAddrPort(to)
			if err != nil {
				return err
			}
			request, buf := make([]byte, o.size), make([]byte, o.size)
			go locked(failed, func() error {
				return f.ask(o, b, 2*o.size, func() (bool, error) { return connectAndAsk(addr, request, buf) })
			})
			continue
		}
		exchange, network := askTCP, "tcp"
		if o.proto == "udp" {
			exchange, network = askUDP, "udp"
		}
		c, err := dial(network, to, nil)
		if err != nil {
			return err
		}
		request, answer := make([]byte, o.size), o.size
		if speaks.begin != nil {
			if request, answer, err = speaks.converse(c, o.size); err != nil {
				return fmt.Errorf("begin %s: %w", o.proto, err)
			}
		}
		fd, err := blocking(c)
		if err != nil {
			return err
		}
		if o.proto == "udp" {
			tv := unix.NsecToTimeval(int64(patience(o)))
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
				return err
			}
		}
		buf := make([]byte, answer)
		go locked(failed, func() error {
			return f.ask(o, b, len(request)+answer, func() (bool, error) { return exchange(fd, request, buf) })
		})
	}
	go watch(flows, b)
	b.setReady()
	return <-failed
}

// ask makes requests, and returns nil after o.count of them. do makes one request and reports whether
// it was answered. bytes is the size of an answered request, in both directions.
func (f *flow) ask(o options, b *Board, bytes int, do func() (answered bool, err error)) error {
	defer f.done.Store(true)
	for sent := 0; o.count == 0 || sent < o.count; {
		if paused(b) {
			continue
		}
		sent++
		start := time.Now()
		answered, err := do()
		if err != nil {
			return err
		}
		if !answered {
			b.fail()
			continue
		}
		f.answers.Add(1)
		b.count(1, bytes)
		b.latency(time.Since(start))
		if r := b.rate(); r != Flood && r > 0 {
			time.Sleep(time.Second / time.Duration(r))
		}
	}
	return nil
}

// patience is how long a client waits for an answer by UDP.
func patience(o options) time.Duration {
	if o.count > 0 {
		return time.Minute // every request must be answered, even on a slow machine
	}
	return Lost
}

// locked runs fn on a new thread, which ends with fn.
func locked(failed chan<- error, fn func() error) {
	runtime.LockOSThread()
	if err := fn(); err != nil {
		failed <- err
	}
}

// blocking takes over the socket of a connection and makes it block in the kernel.
func blocking(c net.Conn) (fd int, err error) {
	defer c.Close()
	s, ok := c.(interface{ File() (*os.File, error) })
	if !ok {
		return -1, fmt.Errorf("%T has no socket", c)
	}
	f, err := s.File()
	if err != nil {
		return -1, err
	}
	defer f.Close()
	if fd, err = unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil { // f's finalizer closes f.Fd()
		return -1, err
	}
	return fd, unix.SetNonblock(fd, false)
}

// askUDP numbers its requests, so that a late answer does not count for the next request. It returns
// false if it could not send the request, or got no answer in time. The error count then shows how far
// to trust the latencies.
func askUDP(fd int, request, buf []byte) (ok bool, err error) {
	request[0]++
	n := 0
	if _, err = unix.Write(fd, request); err == nil {
		for n, err = unix.Read(fd, buf); err == unix.EINTR || err == nil && (n == 0 || buf[0] != request[0]); {
			n, err = unix.Read(fd, buf)
		}
	}
	if err != nil && err != unix.EAGAIN {
		time.Sleep(time.Millisecond) // no server listens yet
	}
	return err == nil, nil
}

func askTCP(fd int, request, buf []byte) (ok bool, err error) {
	if err := writeAll(fd, request); err != nil {
		return false, err
	}
	for len(buf) > 0 {
		n, err := unix.Read(fd, buf)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return false, err
		case n == 0:
			return false, io.ErrUnexpectedEOF
		default:
			buf = buf[n:]
		}
	}
	return true, nil
}

func writeAll(fd int, data []byte) error {
	for len(data) > 0 {
		n, err := unix.Write(fd, data)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// connectAndAsk makes a connection, asks once, and closes it. It returns false if no server
// listens, or no port is free for the moment.
func connectAndAsk(to netip.AddrPort, request, buf []byte) (answered bool, err error) {
	family, sa := sockaddr(to)
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	if err = unix.Connect(fd, sa); err == nil {
		answered, err = askTCP(fd, request, buf)
	}
	if err != nil {
		time.Sleep(time.Millisecond)
	}
	return answered, nil
}

// rrServer answers each request with a copy of it, at each of the addresses.
func rrServer(o options, b *Board) error {
	if protocols()[o.proto].begin != nil {
		return fmt.Errorf("serve %s: use a real server", o.proto)
	}
	const clients = 32 // most clients of an experiment, without --conns
	runtime.GOMAXPROCS(max(o.conns, clients) + spare)
	all := strings.Split(o.listen, ",")
	failed := make(chan error, len(all))
	if o.proto == "tcp" {
		return serveTCP(o, b, func(c net.Conn) {
			runtime.LockOSThread()
			fd, err := blocking(c)
			if err != nil {
				return
			}
			defer unix.Close(fd)
			echo(fd, b)
		})
	}
	for _, listen := range all {
		fd, err := udpSocket(listen, unix.Bind)
		if err != nil {
			return err
		}
		go locked(failed, func() error {
			buf := make([]byte, 64<<10)
			for {
				n, from, err := unix.Recvfrom(fd, buf, 0)
				if err == unix.EINTR {
					continue
				}
				if err != nil {
					return err
				}
				if err := unix.Sendto(fd, buf[:n], 0, from); err != nil {
					b.fail()
					continue
				}
				b.count(1, 2*n)
			}
		})
	}
	b.setReady()
	return <-failed
}

// echo returns when the other side closes the connection.
func echo(fd int, b *Board) {
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Read(fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 || writeAll(fd, buf[:n]) != nil {
			return
		}
		b.count(1, 2*n)
	}
}

// dialogue is rr-client's protocol with a real server: begin prepares the server, and the client then
// repeats one request on the connection.
type dialogue struct {
	// begin prepares the server and returns the request, which the server always
	// answers in the same length.
	begin func(c net.Conn, size int) (request []byte, err error)
	// read reads one whole answer.
	read func(r *bufio.Reader) error
}

// protocols returns the values of --proto. rr-server echoes the protocols without a dialogue.
func protocols() map[string]dialogue {
	return map[string]dialogue{
		"udp": {}, "tcp": {},
		"memcached": {beginMemcached, readMemcached},
		"redis":     {beginRedis, readRedis},
		"http":      {beginHTTP, readHTTP},
		"postgres":  {beginPostgres, readPostgres},
	}
}

// converse starts a dialogue on a connection. It makes one request, and returns that request and the
// length of each answer.
func (d dialogue) converse(c net.Conn, size int) (request []byte, answer int, err error) {
	if request, err = d.begin(c, size); err != nil {
		return nil, 0, err
	}
	if _, err := c.Write(request); err != nil {
		return nil, 0, err
	}
	var seen counter
	r := bufio.NewReader(io.TeeReader(c, &seen))
	if err := d.read(r); err != nil {
		return nil, 0, err
	}
	return request, int(seen) - r.Buffered(), nil
}

// counter counts the bytes written to it.
type counter int

func (n *counter) Write(p []byte) (int, error) {
	*n += counter(len(p))
	return len(p), nil
}

const key = "fairlead"

func value(size int) []byte { return bytes.Repeat([]byte{'x'}, size) }

// expect reads an answer, which must be want.
func expect(r io.Reader, want string) error {
	answer := make([]byte, len(want))
	if _, err := io.ReadFull(r, answer); err != nil {
		return err
	}
	if string(answer) != want {
		return fmt.Errorf("the server answers %q", answer)
	}
	return nil
}

// memcached's text protocol (protocol.txt of memcached, "Storage commands", "Retrieval
// command").
func beginMemcached(c net.Conn, size int) ([]byte, error) {
	if _, err := fmt.Fprintf(c, "set %s 0 0 %d\r\n%s\r\n", key, size, value(size)); err != nil {
		return nil, err
	}
	return []byte("get " + key + "\r\n"), expect(c, "STORED\r\n")
}

func readMemcached(r *bufio.Reader) error {
	for {
		line, err := r.ReadString('\n')
		if err != nil || line == "END\r\n" {
			return err
		}
	}
}

// Redis's protocol, RESP.
func beginRedis(c net.Conn, size int) ([]byte, error) {
	if _, err := fmt.Fprintf(c, "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(key), key, size, value(size)); err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", len(key), key), expect(c, "+OK\r\n")
}

func readRedis(r *bufio.Reader) error {
	line, err := r.ReadString('\n')
	if err != nil {
		return err
	}
	size, err := strconv.Atoi(line[1:max(1, len(line)-2)])
	if err != nil || line[0] != '$' || size < 0 {
		return fmt.Errorf("redis answers %q", line)
	}
	_, err = r.Discard(size + len("\r\n"))
	return err
}

// HTTP/1.1. The server has a page for each requested size, named after it.
func beginHTTP(_ net.Conn, size int) ([]byte, error) {
	return fmt.Appendf(nil, "GET /%d HTTP/1.1\r\nHost: fairlead\r\n\r\n", size), nil
}

func readHTTP(r *bufio.Reader) error {
	answer, err := http.ReadResponse(r, nil)
	if err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK || answer.ContentLength < 0 {
		return fmt.Errorf("the web server answers %q", answer.Status)
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return err
}

// PostgreSQL's protocol 3.0 ("Frontend/Backend Protocol"), for a server with trust authentication.
// The query needs no table.
func beginPostgres(c net.Conn, size int) ([]byte, error) {
	parameters := "user\x00postgres\x00database\x00postgres\x00\x00"
	start := binary.BigEndian.AppendUint32(nil, uint32(8+len(parameters)))
	start = binary.BigEndian.AppendUint32(start, 3<<16)
	if _, err := c.Write(append(start, parameters...)); err != nil {
		return nil, err
	}
	query := fmt.Sprintf("SELECT repeat('x', %d)\x00", size)
	request := binary.BigEndian.AppendUint32([]byte{'Q'}, uint32(4+len(query)))
	return append(request, query...), readPostgres(bufio.NewReader(c))
}

// readPostgres reads messages until the server is ready for a query.
func readPostgres(r *bufio.Reader) error {
	for {
		var head [5]byte // its type, and its length without that
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return err
		}
		if head[0] == 'E' {
			return fmt.Errorf("postgres refuses")
		}
		if _, err := r.Discard(int(binary.BigEndian.Uint32(head[1:])) - 4); err != nil {
			return err
		}
		if head[0] == 'Z' {
			return nil
		}
	}
}

// names returns the protocols in order.
func names() []string { return slices.Sorted(maps.Keys(protocols())) }
