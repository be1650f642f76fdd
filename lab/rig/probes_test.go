package rig

import (
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestQueue checks that the queue's delays are the delays of all packets of one length and of no
// others, and as long as the link makes them.
func TestQueue(t *testing.T) {
	testkit.InFull(t)
	testkit.NeedRoot(t)
	r := build(t, Config{Path: NIC})
	const payload, frame, sent = 1000, 1000 + 14 + 20 + 8, 200
	q, err := r.Queue(frame)
	must(t, err)
	defer q.Close()
	testkit.Must(t, testkit.Err(r.Start(t.Context(), r.Outside, "udp-recv", "--listen", ":9001")))
	softirqs := testkit.WatchSoftirqs(t)
	read := func() *hist.Histogram {
		w, err := q.Read()
		if err != nil || w.Missed != 0 {
			t.Fatalf("%d packets were missed: %v", w.Missed, err)
		}
		return w.Histogram
	}
	for _, link := range []uint64{1000 * 1000 * 1000, 4 * 1000 * 1000} {
		must(t, r.Link(t.Context(), link, nil))
		before, start := read(), time.Now()
		for _, size := range []int{payload, payload - 1} {
			g, err := r.Start(t.Context(), r.Boxes[0], "udp-send", "--to", r.Uplink(9001), "--size", fmt.Sprint(size), "--rate", "20000", "--count", fmt.Sprint(sent), "--buffer", "1000000")
			must(t, err)
			// A sender that the clock ends may not have counted its last packets.
			counted(t, g, sent)
			must(t, g.Stop())
		}
		took := time.Since(start)
		var waited *hist.Histogram
		for end := time.Now().Add(90 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if waited = read().Since(before); waited.Count() >= sent { // packets in the queue have to leave
				break
			}
		}
		if waited.Count() != sent {
			softirqs.SkipIfMissed()
			t.Errorf("%d bit/s: %d packets were sent, of %d it is known how long they waited", link, sent, waited.Count())
		}
		// The last packet came within the time that the senders took, and left when everything
		// beyond the bucket's burst had been sent.
		least := time.Duration(float64(sent*frame)-float64(burst(link)))*8*time.Second/time.Duration(link) - took
		if longest := waited.Quantile(1); longest < least || link > 100*1000*1000 && longest > took {
			t.Errorf("%d bit/s: the longest wait was %v, at least %v is due", link, longest, least)
		}
	}
}

// TestStopwatch checks that a stopwatch measures the softirqs of traffic from its start on.
func TestStopwatch(t *testing.T) {
	testkit.NeedRoot(t)
	w, err := NewStopwatch()
	must(t, err)
	t.Cleanup(func() { must(t, w.Close()) })
	r := build(t, Config{Path: NIC, Unsteered: true})
	run, err := r.Send(t.Context(), Traffic{Kind: UDP})
	must(t, err)
	must(t, run.SetRate(1000))
	if !moves(run.Receivers[0]) {
		t.Fatal("nothing is received")
	}
	if sum, _, err := w.Read(); err != nil || sum != 0 {
		t.Errorf("before its start it has %v, %v", sum, err)
	}
	must(t, w.Start())
	testkit.AwaitNone(t, func() string {
		sum, _, err := w.Read()
		must(t, err)
		if sum == 0 {
			return "it measures no softirq"
		}
		return ""
	})
	must(t, run.Stop())
}

// TestTap checks that a tap has each request to the port and its reply, in order, and no other
// packet.
func TestTap(t *testing.T) {
	testkit.NeedRoot(t)
	r := build(t, Config{Path: NIC})
	tap, err := r.Tap(9001)
	must(t, err)
	defer tap.Close()
	const n = 20
	for _, port := range []int{9002, 9001} {
		if _, err := r.Start(t.Context(), r.Outside, "rr-server", "--proto", "udp", "--listen", fmt.Sprintf(":%d", port)); err != nil {
			t.Fatal(err)
		}
		g, err := r.Start(t.Context(), r.Boxes[0], "rr-client", "--proto", "udp", "--to", r.Uplink(port), "--conns", "1", "--rate", "1000", "--count", fmt.Sprint(n))
		must(t, err)
		counted(t, g, n)
	}
	trips, err := tap.Trips()
	if err != nil || len(trips) != n {
		t.Fatalf("%d round trips, want %d: %v", len(trips), n, err)
	}
	for i, trip := range trips {
		if trip.Answered <= trip.Asked || i > 0 && trip.Asked <= trips[i-1].Answered {
			t.Errorf("%d: %+v", i, trips)
		}
	}
}

// TestFtrace checks that a recording can be read, and leaves nothing behind.
func TestFtrace(t *testing.T) {
	testkit.NeedRoot(t)
	f, err := NewFtrace("net/net_dev_queue", "net/netif_receive_skb")
	must(t, err)
	c, err := net.Dial("udp", "127.0.0.1:9")
	must(t, err)
	for range 1000 {
		c.Write([]byte("x")) // mostly refused: no socket listens
	}
	c.Close()
	read, err := f.Close()
	if err != nil || read == 0 {
		t.Errorf("%d bytes were read: %v", read, err)
	}
	testkit.Fails(t, "an event that does not exist is recorded", testkit.Err(NewFtrace("net/no_such_event")))
	fs, err := openTracefs()
	must(t, err)
	defer fs.Close()
	left, err := os.ReadDir(instances(fs))
	if err != nil || len(left) != 0 {
		t.Errorf("instances are left: %v (%v)", left, err)
	}
}
