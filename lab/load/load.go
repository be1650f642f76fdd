// Package load has the load generators of the experiments: a UDP flood at a set rate and its receiver,
// TCP bulk, request and response, disk I/O, and a victim that computes forever. They are hidden verbs
// of the program that starts them (`fairlead-lab load ...`), so they run in any namespace, cgroup or
// container image.
//
// A generator counts its work on a [Board], which the experiment reads at the start and the end of a
// measurement. It also prints JSON lines for people. It sets up no namespaces and measures only
// itself: package rig places generators, and package bench reads them.
package load

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Verb is the first argument of a program that runs as a generator.
const Verb = "load"

// Reexec runs a generator if args, usually os.Args, begin with the program and the word load. It then
// returns true and the exit status. Otherwise it returns false. Call it first in main or TestMain.
func Reexec(args []string) (status int, ok bool) {
	if len(args) < 2 || args[1] != Verb {
		return 0, false
	}
	return Main(args[2:], os.Stdout, os.Stderr), true
}

// Command returns a command that runs this program as a generator with arguments for [Main], and the
// board on which it will count. The caller starts the command in its place and then calls [Await].
func Command(args ...string) (*exec.Cmd, *Board, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, nil, fmt.Errorf("find own program: %w", err)
	}
	board, err := NewBoard()
	if err != nil {
		return nil, nil, err
	}
	cmd := exec.Command(exe, append([]string{Verb}, args...)...)
	cmd.Args[0] = "fairlead"
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{board.file} // becomes boardFD
	return cmd, board, nil
}

// Await waits until a generator or a server is ready, or until done is closed because it has ended.
func Await(ctx context.Context, done <-chan struct{}, ready func() bool) error {
	for !ready() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-done:
			return errors.New("it ended before it was ready")
		case <-time.After(2 * time.Millisecond):
		}
	}
	return nil
}

// options are the flags of all generators; each generator uses its own subset.
type options struct {
	to, listen string
	proto      string
	congestion string
	rate       uint64
	size       int
	conns      int
	count      int
	buffer     int
	writes     int
	also       int
	sequential string
	connect    bool
	greet      bool
	segments   int
	nice       int
	every      time.Duration
}

// targets are the addresses to send to.
func (o options) targets() []string { return strings.Split(o.to, ",") }

// setRate parses "100000", "0" and "flood".
func (o *options) setRate(s string) error {
	o.rate = Flood
	if s == "flood" {
		return nil
	}
	var err error
	if o.rate, err = strconv.ParseUint(s, 10, 32); err != nil {
		return errors.New("want a number of packets per second, or flood")
	}
	return nil
}

type generator struct {
	help string
	run  func(options, *Board) error // returns only with an error
}

func generators() map[string]generator {
	return map[string]generator{
		"udp-send":  {"send datagrams of --size to --to at --rate", udpSend},
		"udp-recv":  {"count the datagrams that arrive at --listen", udpRecv},
		"tcp-send":  {"send bytes to --to over --conns connections", tcpSend},
		"tcp-recv":  {"count the bytes that arrive at --listen", tcpRecv},
		"rr-client": {"send requests of --size to --to and wait for each answer, --conns at once", rrClient},
		"rr-server": {"answer requests at --listen", rrServer},
		"disk":      {"read and write blocks of --size of the file or device --to, --conns at once, past the page cache", disk},
		"mail":      {"make, append to, sync, read and remove files of --size in the directory --to, --conns at once", mail},
		"sqlite":    {"commit transactions to a database in WAL mode in the directory --to, and wait for each", sqlite},
		"burn":      {"compute without end, and count units of work", burn},
	}
}

// Main runs the generator in args until SIGTERM or SIGINT, and returns the exit status. It prints
// its counts as JSON lines: one each --every, and a total at the end.
func Main(args []string, stdout, stderr io.Writer) int {
	all := generators()
	if len(args) == 0 || all[args[0]].run == nil {
		fmt.Fprintln(stderr, "usage: fairlead-lab load GENERATOR [flags]; generators:")
		for _, name := range slices.Sorted(maps.Keys(all)) {
			fmt.Fprintf(stderr, "  %-10s %s\n", name, all[name].help)
		}
		return 2
	}
	o := options{rate: Flood}
	fs := flag.NewFlagSet(args[0], flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&o.to, "to", "127.0.0.1:9000", "address to send to, or several with commas: all get the same")
	fs.StringVar(&o.listen, "listen", ":9000", "address to receive at, or several of UDP for rr-server, with commas")
	fs.StringVar(&o.proto, "proto", "udp", "what rr-client speaks: "+strings.Join(names(), ", ")+"; rr-server answers udp and tcp")
	fs.StringVar(&o.congestion, "congestion", "", "congestion control of tcp-send; by default the kernel's")
	fs.Func("rate", "datagrams per second, or at most requests of each connection; flood, or 0 to wait for the board (all senders)", o.setRate)
	fs.IntVar(&o.size, "size", 1400, "payload of a datagram, request or write, in bytes")
	fs.IntVar(&o.conns, "conns", 1, "connections")
	fs.IntVar(&o.count, "count", 0, "datagrams of udp-send in all, or writes or requests of each connection, after which a sender sends no more; 0 is without end")
	fs.IntVar(&o.buffer, "buffer", 0, "socket buffer in bytes; 0 leaves the kernel's default")
	fs.IntVar(&o.segments, "segments", 1, "datagrams of udp-send that the kernel gets, and passes on, as one super-packet (UDP_SEGMENT)")
	fs.IntVar(&o.writes, "writes", 0, "percentage of writes of disk; the rest are reads")
	fs.IntVar(&o.also, "also", 0, "size of every other block of disk; 0: all are of --size")
	fs.BoolVar(&o.connect, "connect", false, "rr-client --proto tcp: a new connection for each request")
	fs.BoolVar(&o.greet, "greet", false, "udp-send: wait for an answer to a first datagram of one byte, which udp-recv --greet gives")
	fs.StringVar(&o.sequential, "sequential", "none", "what of disk follows one another: none, reads, all")
	fs.IntVar(&o.nice, "nice", 0, "nice value to run at")
	fs.DurationVar(&o.every, "every", 0, "print a line this often")
	if err := fs.Parse(args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if err := o.check(fs.NArg()); err != nil {
		fmt.Fprintf(stderr, "fairlead-lab load %s: %v\n", args[0], err)
		return 2
	}
	board, err := ownBoard()
	if err == nil {
		err = sched.BeNice(o.nice)
	}
	if err == nil {
		err = o.loop(all[args[0]], board, json.NewEncoder(stdout))
	}
	if err != nil {
		fmt.Fprintf(stderr, "fairlead-lab load %s: %v\n", args[0], err)
		return 1
	}
	return 0
}

// maxUDP is the largest payload of UDP over IPv4.
const maxUDP = 65507

func (o options) check(rest int) error {
	switch {
	case rest > 0:
		return errors.New("too many arguments")
	case o.size < 1 || o.size > 1<<20:
		return errors.New("--size must be 1 to 1048576")
	case o.segments < 1 || o.segments > 64 || o.segments > 1 && o.size*o.segments > maxUDP:
		return fmt.Errorf("--segments must be 1 to 64, and of at most %d bytes with --size", maxUDP)
	case o.count < 0:
		return errors.New("--count must not be negative")
	case o.writes < 0 || o.writes > 100:
		return errors.New("--writes must be 0 to 100")
	case o.also < 0 || o.also > 1<<20:
		return errors.New("--also must be 0 to 1048576")
	case !slices.Contains([]string{"none", "reads", "all"}, o.sequential):
		return errors.New("--sequential must be none, reads or all")
	case o.greet && o.size <= greeting:
		return fmt.Errorf("--greet needs a --size of more than %d", greeting)
	case o.connect && o.proto != "tcp":
		return errors.New("--connect needs --proto tcp")
	case o.conns < 1 || o.conns > 10000:
		return errors.New("--conns must be 1 to 10000")
	case !slices.Contains(names(), o.proto):
		return fmt.Errorf("--proto must be one of %s", strings.Join(names(), ", "))
	}
	return nil
}

func (o options) loop(g generator, board *Board, out *json.Encoder) error {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	var tick <-chan time.Time
	if o.every > 0 {
		t := time.NewTicker(o.every)
		defer t.Stop()
		tick = t.C
	}
	board.SetRate(o.rate)
	start := board.Read()
	last := start
	failed := make(chan error, 1)
	go func() { failed <- g.run(o, board) }()
	for {
		select {
		case err := <-failed:
			return err
		case <-tick:
			now := board.Read()
			if err := out.Encode(now.Since(last).line(false)); err != nil {
				return err
			}
			last = now
		case <-ctx.Done():
			return out.Encode(board.Read().Since(start).line(true))
		}
	}
}

// line is the printed form of a Window.
type line struct {
	Window
	Rate    float64 `json:"ops_per_second"`
	BitRate float64 `json:"bits_per_second"`
	P50     float64 `json:"p50_seconds,omitempty"`
	P99     float64 `json:"p99_seconds,omitempty"`
	Total   bool    `json:"total,omitempty"`
}

func (w Window) line(total bool) line {
	return line{w, w.Rate(), w.BitRate(), w.Latency(0.5).Seconds(), w.Latency(0.99).Seconds(), total}
}

// unit is the victim's unit of work, in rounds of xorshift64. Each round depends on the previous one,
// so a unit takes the same number of cycles everywhere: about 25 µs at 3 GHz.
const unit = 12500

func burn(_ options, b *Board) error {
	runtime.LockOSThread()
	b.setReady()
	x := uint64(88172645463325252)
	for x != 0 { // always: xorshift never reaches 0, but the compiler cannot know
		for range unit {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
		}
		b.count(1, 0)
	}
	return nil
}
