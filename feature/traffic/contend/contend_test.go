package contend

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

const ms = time.Millisecond

// Two looks, a second apart, at an uplink of 1 Gbit/s on which packets wait for 8 ms. Container 2 sends
// 107 MB of 125. Container 1 is under test: it has sent 12.5 MB on one socket, and all of them waited
// here.
func looks(change func(was, now *Uplink, before, s *Sender)) (Uplink, Uplink) {
	const cookie, other = 7, 8
	at := time.Unix(1_800_000_000, 0)
	was := Uplink{Taken: at, Rate: 1e9, Stats: qdisc.Stats{Bytes: 1e9, Packets: 1e6, Backlog: 1e6}}
	now := Uplink{Taken: at.Add(time.Second), Rate: 1e9, Stats: qdisc.Stats{Bytes: 1e9 + 125e6, Packets: 1e6 + 9e4, Backlog: 1e6}}
	before := Sender{1, netdev.Sender{Cookie: cookie, Acked: 5e6, Segments: 100, Busy: 10 * time.Second, Window: time.Second, Unsent: 1, InFlight: 1e5, Room: 3e6, RTT: 8 * ms, Least: ms / 10}}
	s := before
	s.Acked, s.Segments, s.Busy = s.Acked+12_500_000, s.Segments+9000, s.Busy+time.Second
	rest := Sender{2, before.Sender}
	rest.Cookie = other
	most := Sender{2, s.Sender}
	most.Cookie, most.Acked = other, 112e6
	if change != nil {
		change(&was, &now, &before, &s)
	}
	was.Senders = map[uint64]Sender{cookie: before, other: rest}
	now.Senders = map[uint64]Sender{cookie: s, other: most}
	return was, now
}

func TestLosses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(was, now *Uplink, before, s *Sender)
		want   float64 // of container 1
	}{
		"it waits here":         {nil, 0.9},
		"of unknown rate":       {func(was, now *Uplink, _, _ *Sender) { was.Rate, now.Rate = 0, 0 }, 0.9},
		"its buffer was full":   {func(_, _ *Uplink, b, s *Sender) { b.Unsent, s.Unsent, s.Buffer = 0, 0, 900*ms; s.InFlight = 5e3 }, 0.75}, // 5 kB each 0.1 ms
		"it loses as others do": {func(_, now *Uplink, _, s *Sender) { now.Drops, s.Retransmits = 900, 90 }, 0.9},
		"its peer is narrow":    {func(_, _ *Uplink, _, s *Sender) { s.Room = 2500 }, 0.5}, // each 0.1 ms
		"it sends by others": {func(was, now *Uplink, _, _ *Sender) {
			was.Sent, now.Sent = map[container.ID]uint64{1: 1e6}, map[container.ID]uint64{1: 26e6}
		}, 0.8},

		"it has no more to send":     {func(_, _ *Uplink, b, s *Sender) { b.Unsent, s.Unsent = 0, 0 }, 0},
		"it had none before":         {func(_, _ *Uplink, b, _ *Sender) { b.Unsent = 0 }, 0},
		"its peer takes no more":     {func(_, _ *Uplink, _, s *Sender) { s.Window += 200 * ms }, 0},
		"it paces itself":            {func(_, _ *Uplink, _, s *Sender) { s.Paced = true }, 0},
		"it is idle now and then":    {func(_, _ *Uplink, _, s *Sender) { s.Busy -= 200 * ms }, 0},
		"its packets wait elsewhere": {func(_, _ *Uplink, _, s *Sender) { s.RTT = 30 * ms }, 0},
		"its packets do not wait":    {func(_, _ *Uplink, _, s *Sender) { s.RTT, s.Least = 31*ms, 30*ms }, 0},
		"its packets drop elsewhere": {func(_, _ *Uplink, _, s *Sender) { s.Retransmits = 90 }, 0},
		"nothing waits":              {func(was, _ *Uplink, _, _ *Sender) { was.Backlog = 0 }, 0},
		"hardly anything waits": {func(was, now *Uplink, _, s *Sender) {
			was.Backlog, now.Backlog, s.RTT = 9000, 9000, 172*time.Microsecond
		}, 0},
		"the uplink is not full": {func(was, now *Uplink, _, _ *Sender) { was.Rate, now.Rate = 2e9, 2e9 }, 0},
		"it has all":             {func(_, _ *Uplink, _, s *Sender) { s.Acked = 130e6 }, 0},
		"it is new":              {func(_, _ *Uplink, b, _ *Sender) { b.Container = 3 }, 0},
		"the device is another":  {func(was, _ *Uplink, _, _ *Sender) { was.Bytes = 2e9 }, 0},
		"at the same moment":     {func(was, now *Uplink, _, _ *Sender) { now.Taken = was.Taken }, 0},
	} {
		l, lost := Losses(looks(c.change))[1]
		if math.Abs(l.Part-c.want) > 1e-9 || lost != (c.want > 0) || lost && l.Culprit != 2 {
			t.Errorf("%s: lost %+v, want %v by 2", name, l, c.want)
		}
	}
}

// If one socket of a container is slowed elsewhere, no loss is reported, because its size is unknown.
func TestHeldElsewhere(t *testing.T) {
	was, now := looks(nil)
	s := now.Senders[7]
	s.Cookie, s.Paced = 9, true
	was.Senders[9], now.Senders[9] = was.Senders[7], s
	if l, lost := Losses(was, now)[1]; lost {
		t.Errorf("lost %+v", l)
	}
	if l := Losses(was, now)[2]; l.Culprit != 1 || l.Part <= 0 {
		t.Errorf("the other lost %+v; want a part, by 1", l)
	}
}
