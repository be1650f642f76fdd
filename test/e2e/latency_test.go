package e2e

import (
	"bufio"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// TestLatency measures a container's packets by policy, reads the result from the host and from inside, and subtracts the host's part from the round trips of a program.
func TestLatency(t *testing.T) {
	r := newRig(t)
	one := r.add(sandbox.Spec{Name: "e2e-one", Labels: map[string]string{"fairlead.latency": "on"}})
	two := r.add(sandbox.Spec{Name: "e2e-two"})
	before := r.state()
	a := newAgent(t, r.host, "--sandbox-dir", r.Sandboxes.Dir(), "--uplink", "nic0=1gbit")
	a.start()
	for _, b := range []*sandbox.Box{one, two} {
		a.stands(b.Name, "netcpu", api.StateDone)
	}
	r.reachable("at the beginning")
	client := []string{"--socket", a.path("fairlead.sock"), "--config", a.path("config.yaml")}
	ping := func(of ...string) output {
		args := append(append([]string{"latency", "run"}, client...), of...)
		return fairlead(t, append(args, "--", "busybox", "ping", "-c", "3", "-i", "0.2", "10.66.0.1")...)
	}
	await(t, "three round trips", func() error {
		return says(ping("--container", "e2e-one"), 0, "3 packets received", "CORRECTED", "icmp", "10.66.0.1", "3 round trips")
	})
	await(t, "three round trips of a container without policy", func() error {
		return says(ping("--container", "e2e-two"), 0, "3 packets received", "3 round trips", "e2e-two (sandbox, id", "measured while this runs")
	})
	mustSay(t, a.run("latency", "--total", "--stages", "--protocols"), 0, "e2e-one", "egress", "icmp", "added", "stack", "deliver")
	await(t, "the end of what was measured for a run", func() error {
		if o := a.run("latency", "--total"); strings.Contains(o.out, "e2e-two") {
			return fmt.Errorf("a container without policy is measured: %v", o)
		}
		return nil
	})

	inside := func(b *sandbox.Box) output {
		var out, errs strings.Builder
		cmd := exec.Command(program, "latency", "run", "--self", "--self-socket", a.path("self.sock"), "--config", a.path("config.yaml"), "--", "busybox", "ping", "-c", "2", "-i", "0.2", "10.66.0.1")
		cmd.Stdout, cmd.Stderr = &out, &errs
		p, err := b.Start(cmd)
		must(t, err)
		ends(t, p.PID, p.Done())
		p.Wait() // its status is below
		return output{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
	}
	await(t, "two round trips as the container sees them", func() error {
		if err := says(inside(one), 0, "2 packets received", "2 round trips"); err != nil {
			return fmt.Errorf("inside: %w", err)
		}
		return nil
	})
	mustSay(t, inside(two), 1, "fairlead.latency=on")

	// What a killed trace leaves ends once it has not asked for a while (feature/latency TestMeasureFor).
	trace := exec.Command(program, append([]string{"latency", "trace", "e2e-two"}, client...)...)
	said, err := trace.StderrPipe()
	must(t, err)
	must(t, trace.Start())
	if line, err := bufio.NewReader(said).ReadString('\n'); err != nil || !strings.Contains(line, "measured while this runs") {
		t.Errorf("trace of a container without policy: %q, %v", line, err)
	}
	mustSay(t, a.run("explain", "e2e-two"), 0, "has it measured while it runs")
	trace.Process.Kill()
	trace.Wait()
	a.stop()
	r.sameAs(before, "after the agent")
}
