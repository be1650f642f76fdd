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
	"strings"

	"github.com/fairlead-project/fairlead/api"
)

// httpVerb makes the test binary what `curl --unix-socket SOCKET -X METHOD URL -d BODY`
// is: it prints the status and the answer.
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

// coverageOf gives what became of a container's packets of one protocol.
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

// records makes a container ping, and waits for the record of each packet to and from
// the one it asks, and of no other: each with its times between device and uplink, and
// between socket and uplink.
func (a *agent) records(name, peer string, pings int, ping func()) {
	a.t.Helper()
	filter := api.LatencyFilter{Protocol: api.LatencyICMP, Peer: netip.MustParsePrefix(peer + "/32")}
	first, err := a.api.LatencyRecords(a.t.Context(), name, filter, 0)
	must(a.t, err)
	ping()
	filter.After = first.Next
	await(a.t, fmt.Sprintf("%d pings of %s to be recorded", pings, name), func() error {
		got, err := a.api.LatencyRecords(a.t.Context(), name, filter, 0)
		if err != nil {
			return err
		}
		seen := make(map[string]int)
		for _, r := range got.Records {
			if r.Added == nil || r.Stack == nil || *r.Added < 0 || *r.Stack < *r.Added {
				a.t.Fatalf("%s: %+v", name, r)
			}
			seen[r.Direction]++
		}
		if seen["egress"] != pings || seen["ingress"] != pings {
			c, _, _ := a.coverageOf(name, "ingress", api.LatencyICMP)
			return fmt.Errorf("there are %v; lost %d, missed %d; ingress %+v", seen, got.Lost, got.Missed, c)
		}
		return nil
	})
}

// latencyIs waits until a container is measured.
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
