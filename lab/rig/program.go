package rig

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// Real programs as traffic. Iperf3UDP and Iperf3TCP are 1 Gbit/s each from outside. Memcached is a
// server under requests from outside, as TCPRR. FIO sends no packets: it reads 4 KiB blocks from
// the disk at random, an interferer of another kind.
const (
	Iperf3UDP Kind = "iperf3-udp"
	Iperf3TCP Kind = "iperf3-tcp"
	Memcached Kind = "memcached"
	FIO       Kind = "fio"
)

// Program returns the name of the program that a kind of traffic needs installed, "" if it needs
// none.
func (k Kind) Program() string {
	switch k {
	case Iperf3UDP, Iperf3TCP:
		return "iperf3"
	case Memcached, FIO:
		return string(k)
	}
	return ""
}

// launch starts a program of the machine in a sandbox, on the sandbox's CPU. Its output goes to
// out.
func (r *Rig) launch(out io.Writer, box *sandbox.Box, name string, args ...string) (*sandbox.Process, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", name, err)
	}
	cmd := exec.Command(path, args...)
	cmd.Stdout = out
	return box.Start(cmd, r.cpuOf(box))
}

// program starts one neighbour's part of t, in the i-th container, and its counterpart outside. It
// starts them paused, where that is possible.
func (r *Rig) program(ctx context.Context, run *Running, t Traffic, i int) error {
	box := r.Boxes[i]
	var out io.Writer
	start := func(in *sandbox.Box, driver bool, name string, args ...string) (*sandbox.Process, error) {
		p, err := r.launch(out, in, name, args...)
		if err == nil && driver {
			run.drivers = append(run.drivers, p)
		} else if err == nil {
			run.servers = append(run.servers, p)
		}
		return p, err
	}
	switch t.Kind {
	case Iperf3UDP, Iperf3TCP:
		server, err := start(box, false, "iperf3", "-s", "-p", port)
		if err != nil {
			return err
		}
		if err := listens(ctx, server); err != nil {
			return err
		}
		args := []string{"-c", address(i), "-p", port, "-t", "86400", "-i", "0.1", "--forceflush"}
		if t.Kind == Iperf3UDP {
			args = append(args, "-u", "-b", "1G", "-l", "1400")
		} else {
			args = append(args, "-b", "1G", "-C", "cubic")
		}
		sends := &until{text: "bits/sec", seen: make(chan struct{})}
		out = sends
		client, err := start(r.Outside, true, "iperf3", args...)
		if err != nil {
			return err
		}
		// A program that is stopped while it connects gives up when it resumes.
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for iperf3 to send: %w", ctx.Err())
		case <-client.Done():
			return fmt.Errorf("an iperf3 ended before it sent: %w", client.Wait())
		case <-sends.seen:
			return nil
		}
	case Memcached:
		p, err := r.Serve(ctx, Memcache, i)
		if err != nil {
			return err
		}
		run.servers = append(run.servers, p)
		g, err := r.memcachedClient(ctx, i, 16)
		if err == nil {
			run.Senders = append(run.Senders, g)
		}
		return err
	case FIO:
		dir, err := r.TempDir("fio-" + strconv.Itoa(len(r.temp)))
		if err != nil {
			return err
		}
		_, err = start(box, true, "fio", "--name=fl", "--filename="+filepath.Join(dir, "data"), "--size=64M", "--rw=randread", "--bs=4k",
			"--direct=1", "--ioengine=psync", "--thread", "--time_based", "--runtime=86400", "--output="+os.DevNull)
		return err
	}
	return fmt.Errorf("no such traffic: %q", t.Kind)
}

// until receives the output of a program, and only detects that a text has come.
type until struct {
	text string
	seen chan struct{} // closed when text has been written, in one piece
	once sync.Once
}

func (u *until) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(u.text)) {
		u.once.Do(func() { close(u.seen) })
	}
	return len(p), nil
}

func (r *Rig) memcachedClient(ctx context.Context, i, conns int) (*Generator, error) {
	return r.Start(ctx, r.Outside, "rr-client", "--proto", "memcached", "--size", "1000", "--conns", strconv.Itoa(conns),
		"--to", r.target(i), "--rate", "0", "--nice", senderNice)
}

// ServeVictim makes the victim a memcached under requests from outside. client counts them, and
// starts paused.
func (r *Rig) ServeVictim(ctx context.Context) (server *sandbox.Process, client *Generator, err error) {
	if server, err = r.Serve(ctx, Memcache, 0); err != nil {
		return nil, nil, err
	}
	client, err = r.memcachedClient(ctx, 0, 16)
	return server, client, err
}

// Sysbench runs sysbench's CPU test in the victim for so many seconds, at least
// one, and returns its events per second.
func (r *Rig) Sysbench(ctx context.Context, length time.Duration) (float64, error) {
	path, err := exec.LookPath("sysbench")
	if err != nil {
		return 0, fmt.Errorf("run sysbench: %w", err)
	}
	seconds := max(1, int(math.Round(length.Seconds())))
	var out bytes.Buffer
	cmd := exec.Command(path, "cpu", "--cpu-max-prime=500", "--threads=1", "--events=0", "--time="+strconv.Itoa(seconds), "run")
	cmd.Stdout = &out
	p, err := r.Victim().Start(cmd, r.cpuOf(r.Victim()))
	if err != nil {
		return 0, err
	}
	select {
	case <-ctx.Done():
		p.Kill()
		<-p.Done()
		return 0, ctx.Err()
	case <-p.Done():
	}
	if err := p.Wait(); err != nil {
		return 0, fmt.Errorf("run sysbench: %w", err)
	}
	return parseSysbench(out.String())
}

var eventsPerSecond = regexp.MustCompile(`(?m)^\s*events per second:\s*([0-9.]+)\s*$`)

func parseSysbench(out string) (float64, error) {
	m := eventsPerSecond.FindStringSubmatch(out)
	if m == nil {
		return 0, errors.New("sysbench prints no events per second")
	}
	return strconv.ParseFloat(m[1], 64)
}

// listens waits until a process listens on the rig's TCP port.
func listens(ctx context.Context, p *sandbox.Process) error {
	return await(ctx, p, func() bool { return atPort(p.PID, listening) })
}

// atPort reports whether the network namespace of a process has a TCP socket at the rig's port in a
// state that in accepts.
func atPort(pid int, in func(state string) bool) bool {
	n, err := strconv.Atoi(port)
	if err != nil {
		return false
	}
	for _, file := range []string{"tcp", "tcp6"} {
		data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "net", file))
		if err == nil && socket(data, n, in) {
			return true
		}
	}
	return false
}

// await waits until a server is ready.
func await(ctx context.Context, p *sandbox.Process, ready func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for !ready() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for a server to listen: %w", ctx.Err())
		case <-p.Done():
			return fmt.Errorf("a server ended before it listened: %w", p.Wait())
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}

// socket reports whether a table in the format of proc_net_tcp has a socket at a local port, in a
// state that in accepts.
func socket(table []byte, port int, in func(state string) bool) bool {
	for s := bufio.NewScanner(bytes.NewReader(table)); s.Scan(); {
		f := strings.Fields(s.Text()) // sl local_address rem_address st
		if len(f) > 3 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) && in(f[3]) {
			return true
		}
	}
	return false
}

// The states of a socket, as in the kernel's tcp_states.h.
func listening(state string) bool { return state == "0A" }
func connected(state string) bool { return state != "0A" && state != "06" } // TIME_WAIT
