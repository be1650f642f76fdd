package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// httpVerb makes the test binary do what `curl --unix-socket SOCKET -X METHOD URL -d BODY` does: it
// prints the status and the answer.
const httpVerb = "e2e-http"

func askHTTP(socket, method, url, body string) int {
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err == nil {
		var resp *http.Response
		if resp, err = c.Do(req); err == nil {
			fmt.Println(resp.StatusCode, resp.Header.Get("Content-Type"))
			_, err = io.Copy(os.Stdout, resp.Body)
		}
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// coverageOf returns the coverage of a container's packets of one protocol.
func (a *agent) coverageOf(name, direction, protocol string) (c api.LatencyCoverage, stages []api.LatencyStage, err error) {
	l, err := a.api.Latency(a.t.Context(), name, 0)
	if err != nil {
		return c, nil, err
	}
	for _, row := range l.Containers {
		for _, p := range row.Protocols {
			if row.Name == name && row.Direction == direction && p.Protocol == protocol {
				return p.Coverage, p.Stages, nil
			}
		}
	}
	return c, nil, nil
}

// records makes a container ping, and waits for the record of each packet to and from its peer, and
// of no other. Each record has its times between device and uplink, and between socket and uplink.
// records returns their number. Where the kernel has called no program for softirqs meanwhile,
// packets may lack a record.
func (a *agent) records(name, peer string, pings int, ping func()) (n int) {
	a.t.Helper()
	filter := api.LatencyFilter{Protocol: api.LatencyICMP, Peer: netip.MustParsePrefix(peer + "/32")}
	first, err := a.api.LatencyRecords(a.t.Context(), name, filter, 0)
	must(a.t, err)
	softirqs := testkit.WatchSoftirqs(a.t)
	ping()
	filter.After = first.Next
	const late = 10 * time.Second // a record that is missing by then does not come
	pinged := time.Now()
	await(a.t, fmt.Sprintf("%d pings of %s to be recorded", pings, name), func() error {
		got, err := a.api.LatencyRecords(a.t.Context(), name, filter, 0)
		if err != nil {
			return err
		}
		seen := make(map[string]int)
		for _, r := range got.Records {
			asked := r.Direction == "ingress" && r.Type != 0 // the kernel answers: no socket gets it
			if r.Added == nil || *r.Added < 0 || !asked && (r.Stack == nil || *r.Stack < *r.Added) {
				a.t.Fatalf("%s: %+v", name, r)
			}
			seen[r.Direction]++
		}
		n = len(got.Records)
		if seen["egress"] == pings && seen["ingress"] == pings {
			return nil
		}
		c, _, _ := a.coverageOf(name, "ingress", api.LatencyICMP)
		err = fmt.Errorf("there are %v; lost %d, missed %d; ingress %+v", seen, got.Lost, got.Missed, c)
		if seen["egress"] <= pings && seen["ingress"] <= pings && time.Since(pinged) > late && softirqs.Missed() > 0 {
			a.t.Logf("%s: %v, and the kernel called no BPF program for %d network softirqs", name, err, softirqs.Missed())
			return nil
		}
		return err
	})
	return n
}

// latencyIs waits until latency measures a container.
func (a *agent) latencyIs(name string) {
	a.t.Helper()
	await(a.t, name+" to be measured", func() error {
		l, err := a.api.Latency(a.t.Context(), name, 0)
		if err == nil && len(l.Containers) == 0 {
			err = errors.New("it is not")
		}
		return err
	})
}

// testLatency measures packets of Docker's own containers: each packet once, a stage that delays
// them, and what a container sees of itself, with privileges and without.
func (h *host) testLatency(t *testing.T) {
	defer h.with(t)()
	const outside = "10.213.255.1"
	exe, err := os.Executable()
	must(t, err)
	exe, err = filepath.EvalSymlinks(exe)
	must(t, err)
	inside := []string{
		"--label", "fairlead.latency=on", "-v", h.agent.path("self.sock") + ":" + api.DefaultSelfSocket,
		"-v", program + ":/bin/fairlead:ro", "-v", exe + ":/bin/ask:ro",
	}
	h.sleeper(t, "timed", inside...)
	h.sleeper(t, "poor", append(inside, "--user", "65534:65534", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")...)
	h.agent.latencyIs("timed")
	h.agent.latencyIs("poor")
	ping := func(args ...string) {
		t.Helper()
		h.Must(t, append([]string{"exec", "timed", "ping", "-W", "30"}, append(args, outside)...)...)
	}
	in := func(name string, args ...string) string {
		t.Helper()
		out, err := h.Run(append([]string{"exec", name}, args...)...)
		if err != nil {
			out += err.Error()
		}
		return out
	}
	curl := func(name, method, url, body string) string {
		t.Helper()
		return in(name, "/bin/ask", httpVerb, api.DefaultSelfSocket, method, "http://self"+url, body)
	}

	h.agent.records("timed", outside, 20, func() { ping("-c", "20", "-i", "0.02") })

	// This is how MACE is used: on, measure, read.
	in("timed", "fairlead", "latency", "trace", "--self", "--on")
	lines := h.agent.records("timed", outside, 5, func() { ping("-c", "5", "-i", "0.02") })
	for packet, read := range map[string]func() string{
		`(?m)^\S+ (egress|ingress) .*  stack \d`: func() string {
			return in("timed", "fairlead", "latency", "trace", "--self", "--kept", "--peer", outside)
		},
		`"direction": ?"(egress|ingress)"`: func() string {
			return curl("timed", "GET", "/v1/self/latency/records?after=1&peer="+outside, "")
		},
	} {
		await(t, "the packets of the container itself", func() error {
			if out := read(); len(regexp.MustCompile(packet).FindAllString(out, -1)) < lines {
				return fmt.Errorf("%s", out)
			}
			return nil
		})
	}
	if out := curl("timed", "POST", "/v1/self/latency/tracing", `{"on": false}`); !strings.HasPrefix(out, "200 application/json") || !strings.Contains(out, `"on":false`) {
		t.Errorf("off: %s", out)
	}

	// Without privileges the container still sees itself, and nothing of others.
	other, err := h.agent.find("timed")
	must(t, err)
	for _, url := range []string{"/v1/self", "/v1/self/latency/records?after=1"} {
		out := curl("poor", "GET", url, "")
		if !strings.HasPrefix(out, "200 ") {
			t.Errorf("poor asks for %s: %s", url, out)
		}
		for _, secret := range []string{"timed", other.ID.String(), outside, h.agent.dir} {
			if strings.Contains(out, secret) {
				t.Errorf("poor is told of %q: %s", secret, out)
			}
		}
	}
	for _, bad := range []struct{ method, url, body, status string }{
		{"GET", "/v1/self/latency/records?peer=x", "", "400"},
		{"GET", "/v1/self/latency/records?over=1h", "", "400"},
		{"POST", "/v1/self/latency/tracing", "on", "400"},
		{"POST", "/v1/self/latency/tracing", `{"container": "timed", "on": true}`, "400"},
		{"POST", "/v1/self/latency/tracing", strings.Repeat(" ", 70_000), "413"},
		{"DELETE", "/v1/self/latency/tracing", "", "405"},
		{"GET", "/v1/latency", "", "404"},
		{"GET", "/v1/containers/timed/latency/records", "", "404"},
		{"POST", "/v1/restore", "{}", "404"},
	} {
		if out := curl("poor", bad.method, bad.url, bad.body); !strings.HasPrefix(out, bad.status+" ") {
			t.Errorf("%s %s: %.200s, want %s", bad.method, bad.url, out, bad.status)
		}
	}

	// Packets held by a ceil show where they are held, at the host's end of the veth, and in no
	// other stage.
	const long = 1.0 // seconds
	_, before, err := h.agent.coverageOf("timed", "egress", api.LatencyICMP)
	must(t, err)
	for _, s := range before {
		if s.Max >= long {
			t.Fatalf("before anything is held: %+v", s)
		}
	}
	mustSay(t, h.agent.run("set", "timed", "net.ceil=64kbit"), 0)
	// Together they take two seconds, less than the wire's three probes for the container's
	// address. The answer to these waits in the class behind the pings: after three seconds the
	// wire would give the address up, and drop replies.
	h.agent.records("timed", outside, 15, func() {
		// A single ping for all packets would not wait for replies later than twice the worst so
		// far.
		h.Must(t, "exec", "timed", "sh", "-c", "for i in $(seq 15); do ping -c 1 -W 60 -s 1400 "+outside+" & done; wait")
	})
	_, after, err := h.agent.coverageOf("timed", "egress", api.LatencyICMP)
	must(t, err)
	for _, s := range after {
		if held := s.Max >= long; held != (s.Stage == "forward") {
			t.Errorf("while the class is held: %+v", s)
		}
	}
	mustSay(t, h.agent.run("latency", "timed", "--stages", "--total"), 0, "timed, egress", "forward", "WHERE THE MEAN GOES")
	h.remove(t, "timed", "poor")
	h.agent.rests()
}

// swarmLatency measures packets between two engines on their overlay network: the inner packets, at
// both ends.
func swarmLatency(t *testing.T, nodes [2]*testkit.Docker, agents [2]*agent) {
	t.Helper()
	const packets = 10
	var addr string
	for n, d := range nodes {
		name := fmt.Sprintf("timed%d", n)
		d.Must(t, "run", "-d", "--name", name, "--network", testkit.SwarmNetwork, "--label", "fairlead.latency=on", d.Image, "sleep", "1000")
		agents[n].latencyIs(name)
		addr = d.Must(t, "inspect", "--format", "{{(index .NetworkSettings.Networks \""+testkit.SwarmNetwork+"\").IPAddress}}", name)
	}
	await(t, "the overlay to know the address", func() error {
		_, err := nodes[0].Run("exec", "timed0", "ping", "-c", "1", "-W", "5", addr)
		return err
	})
	back := nodes[0].Must(t, "inspect", "--format", "{{(index .NetworkSettings.Networks \""+testkit.SwarmNetwork+"\").IPAddress}}", "timed0")
	agents[0].records("timed0", addr, packets, func() {
		agents[1].records("timed1", back, packets, func() {
			nodes[0].Must(t, "exec", "timed0", "ping", "-c", fmt.Sprint(packets), "-i", "0.02", "-W", "30", addr)
		})
	})
	for n, d := range nodes {
		d.Must(t, "rm", "-f", fmt.Sprintf("timed%d", n))
	}
}
