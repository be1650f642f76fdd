package rig

import (
	"fmt"
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
	if _, err := r.Start(t.Context(), r.Outside, "udp-recv", "--listen", ":9001"); err != nil {
		t.Fatal(err)
	}
	softirqs := testkit.WatchSoftirqs(t)
	read := func() *hist.Histogram {
		w, err := q.Read()
		if err != nil || w.Missed != 0 {
			t.Fatalf("%d packets were missed: %v", w.Missed, err)
		}
		return w.Histogram
	}
	for _, link := range []uint64{1000 * 1000 * 1000, 4 * 1000 * 1000} {
		must(t, r.Link(link, nil))
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
			if waited = read().Since(before); waited.Count() >= sent { // what is in the queue has to leave
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
