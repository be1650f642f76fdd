package account

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/sandbox"
)

// A container floods the loopback of a namespace that it has made for itself, of
// which nobody is told. It gets no credit for that, on whichever CPU it has the
// work done; it is charged for what it takes from others, and nobody else is.
func TestNestedFlood(t *testing.T) {
	for _, c := range []struct {
		name  string
		rps   string // of the loopback there; the sender is on CPU 0
		port  int
		burns string // who computes on CPU 1
		below bool   // in a cgroup that it has made, and that nobody is told of
	}{
		{"in the sender's own time", "", 9000, "", false},
		{"from a cgroup below its own", "", 9000, "", true},
		{"in its own time on another CPU", "2", 9000, "bad", false},
		{"in another's time", "2", 9000, "victim", false},
		{"as a tunnel's", "2", portVXLAN, "victim", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFabric(t)
			boxes := map[string]*sandbox.Box{"bad": f.add("bad", 2, f.host), "victim": f.add("victim", 3, f.host)}
			bad, victim := boxes["bad"], boxes["victim"]
			if c.burns != "" {
				f.load(boxes[c.burns], 1, "burn")
				f.load(victim, 1, "udp-recv", "--listen", ":9000")
				f.load(f.wire, 1, "udp-send", "--to", "10.66.0.3:9000", "--rate", "500")
			}
			p := f.nested(bad, c.rps, "udp-send", "--to", fmt.Sprintf("127.0.0.1:%d", c.port), "--rate", "20000", "--size", "64")
			if c.below {
				dir := filepath.Join(bad.Cgroups()[0], "below")
				must(t, os.Mkdir(dir, 0o755))
				must(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(p.PID)), 0))
			}
			f.measure(while, func(d delta) {
				d.addsUp()
				// Neighbour discovery and the like are the system's.
				mostly(d.t, "the flood, on the account of who sends it", d.of(bad).CPU(), d.here()-d.of(victim).CPU(), 0.9)
				credit := d.thefts[Theft{Victim: Party{Container: f.ids[bad], Kind: Task}, Culprit: System}]
				if credit > d.of(bad).CPU()/20 {
					d.t.Errorf("it gets credit of %v for %v of its own packets' work", credit, d.of(bad).CPU())
				}
				if c.burns == "victim" {
					if d.stolen(victim, bad) == 0 {
						d.t.Error("nothing of it is the victim's loss: nothing was tested")
					}
					if e := d.of(victim).Receive[Encapsulated]; e != (Work{}) {
						d.t.Errorf("the victim is charged %+v for a tunnel", e)
					}
				}
			})
		})
	}
}

// portVXLAN is one of the ports at which tunnels arrive.
const portVXLAN = 4789

// nested starts a generator on CPU 0, in a box's cgroup and in a network namespace
// of its own. rps has the loopback there work on other CPUs (a mask), which takes a
// right on the host; without it there is a user namespace, too, by which anybody can.
func (l *lab) nested(b *sandbox.Box, rps string, args ...string) *sandbox.Process {
	l.t.Helper()
	cmd, board, err := load.Command(args...)
	must(l.t, err)
	l.t.Cleanup(func() { board.Close() })
	unshare, script := []string{"unshare", "--user", "--map-root-user", "--net"}, "ip link set lo up\n"
	if rps != "" {
		unshare = []string{"unshare", "--net", "--mount"}
		script += "mount -t sysfs sysfs /sys\necho " + rps + " >/sys/class/net/lo/queues/rx-0/rps_cpus\n"
	}
	cmd.Args = slices.Concat(unshare, []string{"sh", "-ec", script + `exec "$@"`, "sh", cmd.Path}, cmd.Args[1:])
	cmd.Path = "/usr/bin/unshare"
	p, err := b.Start(cmd, 0)
	must(l.t, err)
	l.t.Cleanup(func() { p.Kill(); p.Wait() })
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	must(l.t, board.Await(ctx, p.Done()))
	return p
}
