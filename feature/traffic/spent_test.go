package traffic

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/volume"
	"github.com/fairlead-project/fairlead/policy"
)

// books is a feature that only decides about volumes, under a clock that can be set.
type books struct {
	*Traffic
	t   *testing.T
	now time.Time
}

func newBooks(t *testing.T, now string) *books {
	t.Helper()
	b := &books{t: t}
	b.set(now)
	clock := func() time.Time { return b.now }
	l, err := volume.Open(volume.Config{Zone: time.UTC, Now: clock, Uptime: func() time.Duration { return time.Hour }})
	if err != nil {
		t.Fatal(err)
	}
	b.Traffic = &Traffic{volumes: &volumes{
		ledger: l, now: clock, log: slog.New(slog.DiscardHandler),
		limits: make(map[container.ID]policy.Volume), decided: make(map[decided]policy.Decision),
	}}
	return b
}

func (b *books) set(now string) {
	b.t.Helper()
	at, err := time.Parse("2006-01-02 15:04", now)
	if err != nil {
		b.t.Fatal(err)
	}
	b.now = at
}

// uses books what an account has sent, and received, so far.
func (b *books) uses(account string, sent, received uint64) {
	b.t.Helper()
	if err := b.volumes.ledger.Count(volume.Device{Index: len(account)}, account, volume.Amount{Sent: sent, Received: received}, true); err != nil {
		b.t.Fatal(err)
	}
}

// decides compares the decisions that count, as "ID net.ceil=1mbit".
func (b *books) decides(what string, targets []policy.Target, want ...string) []policy.Decision {
	b.t.Helper()
	ds, err := b.Decide(targets, true)
	if err != nil {
		b.t.Fatal(err)
	}
	var got []string
	for _, d := range ds {
		if !d.Lapsed(b.now) {
			got = append(got, d.Container.String()+" "+strings.TrimPrefix(d.Key, "fairlead.")+"="+d.Value)
		}
	}
	if strings.Join(got, ", ") != strings.Join(want, ", ") {
		b.t.Errorf("%s: %q, want %q", what, got, want)
	}
	return ds
}

func member(id container.ID, netns uint64, name string, s policy.Settings) policy.Target {
	return policy.Target{Container: container.Container{ID: id, NetNS: netns, Name: name, Source: "docker"}, Settings: s}
}

var monthly = policy.Volume{Bytes: 1000, Per: policy.Monthly, After: mbitOnce}

const mbitOnce = 1_000_000

// The stricter of ceil and volume holds, and a rate does not contradict it.
func TestSpent(t *testing.T) {
	only := func(of policy.Counted) policy.Volume {
		v := monthly
		v.Of = of
		return v
	}
	silent := monthly
	silent.After = 0
	for _, tt := range []struct {
		what     string
		settings policy.Settings
		want     []string
	}{
		{"both directions", policy.Settings{Volume: monthly}, []string{"7 net.ceil=1mbit", "7 net.ingress.ceil=1mbit"}},
		{"the sum of both is more", policy.Settings{Volume: policy.Volume{Bytes: 1001, Per: policy.Monthly, After: mbitOnce}}, nil},
		{"only what it sends", policy.Settings{Volume: only(policy.OnlySent)}, []string{"7 net.ceil=1mbit"}},
		{"it received less", policy.Settings{Volume: only(policy.OnlyReceived)}, nil},
		{"it is only reported", policy.Settings{Volume: silent}, nil},
		{"a laxer ceil, and a rate", policy.Settings{Volume: only(policy.OnlySent), Egress: policy.Net{Rate: 5e6, Ceil: 9e6}}, []string{"7 net.ceil=1mbit", "7 net.rate=1mbit"}},
		{"a stricter ceil", policy.Settings{Volume: only(policy.OnlySent), Egress: policy.Net{Ceil: 5e5}}, nil},
	} {
		b := newBooks(t, "2026-11-26 12:00")
		b.uses("docker/a", 1000, 0)
		b.decides(tt.what, []policy.Target{member(7, 1, "a", tt.settings)}, tt.want...)
	}
}

// The last agreed ceil of containers that share a network is the strictest of their volumes. One
// without policy of the network has no say, and one in another network no part.
func TestSpentTogether(t *testing.T) {
	b := newBooks(t, "2026-11-26 12:00")
	b.uses("docker/a", 1000, 0)
	lax := policy.Volume{Bytes: 500, Per: policy.Daily, Of: policy.OnlySent, After: 2 * mbitOnce}
	strict := policy.Volume{Bytes: 500, Per: policy.Daily, Of: policy.OnlySent, After: mbitOnce}
	b.decides("members", []policy.Target{
		member(1, 1, "a", policy.Settings{Volume: lax}), member(2, 1, "b", policy.Settings{Volume: strict}), member(3, 1, "c", policy.Settings{}),
		member(4, 1, "d", policy.Settings{Egress: policy.Net{Weight: 1}}), member(5, 2, "e", policy.Settings{Volume: strict}),
	}, "1 net.ceil=1mbit", "2 net.ceil=1mbit", "4 net.ceil=1mbit")
}

// A decision ends with its period, returns when the clock does, and stays what it is meanwhile.
func TestSpentUntil(t *testing.T) {
	b := newBooks(t, "2026-11-30 23:50")
	b.uses("docker/a", 1000, 0)
	sent := monthly
	sent.Of = policy.OnlySent
	targets := []policy.Target{member(7, 1, "a", policy.Settings{Volume: sent})}
	first := b.decides("in November", targets, "7 net.ceil=1mbit")[0]
	if !first.Expiry.Equal(b.now.Add(holdFor)) || !strings.Contains(first.Reason, "1kb/month sent is used up until 2026-12-01 00:00 UTC") {
		t.Errorf("%+v", first)
	}
	b.set("2026-11-30 23:58")
	again := b.decides("later", targets, "7 net.ceil=1mbit")[0]
	if !again.Since.Equal(first.Since) || again.Expiry.Format("2006-01-02 15:04") != "2026-12-01 00:00" {
		t.Errorf("%+v, was %+v", again, first)
	}
	b.set("2026-12-01 00:00")
	if back := b.decides("in December", targets); len(back) != 1 || back[0].Key != "fairlead.net.ceil" {
		t.Errorf("nothing takes it back: %+v", back)
	}
	if more := b.decides("later in December", targets); len(more) != 0 {
		t.Errorf("taken back again: %+v", more)
	}
	b.set("2026-11-30 23:59")
	b.decides("the clock was set back", targets, "7 net.ceil=1mbit")
	if adopted := b.Adopt(nil); len(adopted) != 1 || !adopted[0].Expiry.After(b.now) {
		t.Errorf("adopted: %+v", adopted)
	}
	if held := b.volumes.ledger.Held(); len(held) != 1 {
		t.Errorf("held for the next agent: %+v", held)
	}
	targets[0].Settings.Volume.Bytes = 2000
	b.decides("it got more", targets)
}

// The owner names the account, the container does not.
func TestAccounts(t *testing.T) {
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	for _, tt := range []struct {
		what    string
		members []container.Container
		want    string
	}{
		{"a container", []container.Container{{Source: "docker", Name: "web-1"}}, "docker/web-1"},
		{"the first of those that share", []container.Container{{Source: "docker", Name: "sidecar", Started: at(2)}, {Source: "docker", Name: "vpn", Started: at(1)}}, "docker/vpn"},
		{"a pod", []container.Container{{Source: "cgroup", Name: "x", Started: at(1)}, {Source: "containerd", Name: "shop/web-0/app", Namespace: "shop", Pod: "web-0", Started: at(2)}}, "pod/shop/web-0"},
		{"no runtime", []container.Container{{Source: "cgroup", Name: "docker-abc.scope"}}, ""},
		{"a long name", []container.Container{{Source: "docker", Name: strings.Repeat("x", maxAccount)}}, ""},
	} {
		if got := accountOf(tt.members); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.what, got, tt.want)
		}
	}
}
