package serve

import (
	"context"
	"net/url"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestRecordsAsk(t *testing.T) {
	for _, tt := range []struct {
		query, err string
	}{
		{"", ""},
		{"after=7&over=2s&peer=10.0.0.1&port=53&protocol=udp&sample=16", ""},
		{"peer=fd00::/8", ""},
		{"after=-1", `after="-1": want a whole number`},
		{"over=6s", `over="6s": want a time of at most 5s, as 2s`},
		{"over=0s", `over="0s": want a time of at most 5s, as 2s`},
		{"peer=web-1", `peer="web-1": want an address, or a prefix, as 10.0.0.0/8`},
		{"port=0", `port="0": want a number from 1 to 65535`},
		{"port=65536", `port="65536": want a number from 1 to 65535`},
		{"sample=0", `sample="0": want a whole number from 1`},
		{"protocol=sctp", `protocol="sctp": want tcp, udp, icmp or other`},
	} {
		q, err := url.ParseQuery(tt.query)
		testkit.Must(t, err)
		_, _, err = recordsAsk(q, maxSelfOver)
		got := ""
		if err != nil {
			got = err.(*api.Error).Text
		}
		if got != tt.err {
			t.Errorf("%q: %q, want %q", tt.query, got, tt.err)
		}
	}
}

// The agent reads the filter exactly as the client sends it.
func FuzzRecordsAsk(f *testing.F) {
	testkit.Seeds(f, "", "after=7&over=2s&peer=10.0.0.1&port=53&protocol=udp&sample=3", "peer=fd00::1%25eth0", "peer=10.0.0.7/8", "peer=%3A%3Affff%3A10.0.0.1", "port=-1")
	f.Fuzz(func(t *testing.T, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		want, over, err := recordsAsk(q, api.MaxOver)
		if err != nil {
			return
		}
		q, err = url.ParseQuery(want.Query(over))
		testkit.Must(t, err)
		got, again, err := recordsAsk(q, api.MaxOver)
		if err != nil || got != want || again != over {
			t.Errorf("%q: %+v, %v; again %+v, %v, %v", query, want, over, got, again, err)
		}
	})
}

// selfBackend records the requests to the feature, and has two packets.
type selfBackend struct {
	backend
	asked []api.Ask
}

func (b *selfBackend) Command(_ context.Context, ask api.Ask) (any, error) {
	b.asked = append(b.asked, ask)
	if on, ok := ask.Body.(api.LatencyTracing); ok {
		on.Until = time.Unix(1000, 0)
		return on, nil
	}
	added, stack := 46.208e-6, 80.932e-6
	at := time.Unix(1552589043, 315681000)
	return api.LatencyRecords{Next: 3, Records: []api.LatencyRecord{
		{Time: at, Direction: "egress", Seq: 1, Added: &added, Stack: &stack}, {Time: at, Direction: "ingress", Seq: 1, Added: &added}, {Time: at, Direction: "egress"},
	}}, nil
}

// A container switches its own tracing on and off, and reads its packets.
func TestSelfLatency(t *testing.T) {
	b := new(selfBackend)
	socket := served(t, b, 0o666, ServeSelf)
	c := api.Dial(socket)
	defer c.Close()
	on, err := c.SelfLatencyTracing(t.Context(), true)
	if err != nil || !on.On || on.Until.IsZero() {
		t.Errorf("%+v, %v", on, err)
	}
	got, err := c.SelfLatencyRecords(t.Context(), api.LatencyFilter{After: 1, Sample: 4}, 0)
	if err != nil || got.Next != 3 || len(got.Records) != 3 || *got.Records[0].Stack != 80.932e-6 || got.Records[1].Stack != nil {
		t.Errorf("%+v, %v", got, err)
	}
	if len(b.asked) != 2 {
		t.Fatalf("asked %+v", b.asked)
	}
	for i, want := range []any{api.LatencyTracing{On: true}, api.LatencyFilter{After: 1, Most: maxSelfRecords, Sample: 4}} {
		if a := b.asked[i]; a.Feature != "latency" || a.Container != api.Ref(b.Caller(Peer{})) || a.Body != want {
			t.Errorf("asked %+v, want %+v of the caller", a, want)
		}
	}
}

// On the self socket a container sees its own part of a wait, and one sum for all others.
func TestWaitAlone(t *testing.T) {
	w := api.LatencyWait{Stage: "deliver", Seconds: 10, Unknown: 1, By: []api.LatencyCulprit{
		{Work: api.LatencyTasks, Container: 8, Name: "secret", Seconds: 4},
		{Work: api.LatencyPackets, Container: 7, Name: "me", Own: true, Seconds: 3},
		{Work: api.LatencyTasks, Cgroup: "/secret", Seconds: 2},
	}}
	got := alone(w)
	if len(got.By) != 2 || got.By[0].Name != "me" || got.By[1] != (api.LatencyCulprit{Work: api.LatencyOthers, Seconds: 6}) || len(w.By) != 3 {
		t.Errorf("%+v", got)
	}
}
