package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/record"
)

// onlyFull leaves trials whose result is a figure to the tier full.
func onlyFull(t *testing.T) {
	t.Helper()
	if testkit.Scale(t, 0, 1) == 0 {
		testkit.Skip(t, "a figure: only in the tier full")
	}
}

// TestSixty measures an agent that records, beside sixty containers of a Docker Engine: while they
// are idle, and while ten of them send and receive. Its memory and its CPU time are bounded.
func TestSixty(t *testing.T) {
	onlyFull(t)
	const containers, busy, window = 60, 10, 60 * time.Second
	h := newHost(t)
	h.agent.start()
	for i := range containers {
		h.sleeper(t, fmt.Sprintf("box-%d", i))
	}
	await(t, "all to be known", func() error {
		list, err := h.agent.api.Containers(t.Context())
		done := 0
		for _, c := range list {
			if featureOf(c, "netcpu").State == api.StateDone {
				done++
			}
		}
		if done < containers {
			return fmt.Errorf("%d are (%v)", done, err)
		}
		return nil
	})
	measure := func(what string) {
		t.Helper()
		was, recorded, began := testkit.CPUTime(t, h.agent.pid), h.agent.status().Recording, time.Now()
		time.Sleep(window)
		took := (testkit.CPUTime(t, h.agent.pid) - was).Seconds() / time.Since(began).Seconds()
		now, memory := h.agent.status().Recording, testkit.Resident(t, h.agent.pid)
		if now == nil || recorded == nil || now.Frames == recorded.Frames || now.Error != "" {
			t.Fatalf("%s: it recorded %+v after %+v", what, now, recorded)
		}
		each := float64(now.FrameBytes-recorded.FrameBytes) / float64(now.Frames-recorded.Frames)
		t.Logf("%s: %.2f %% of a CPU, of which recording %.2f %%, %.1f MB resident, %.1f kB a frame: %.0f MB in a week without the bound of %d MB",
			what, 100*took, 100*(now.CPU-recorded.CPU)/time.Since(began).Seconds(), memory/1e6, each/1e3,
			each*float64(7*24*time.Hour)/float64(window)*float64(now.Frames-recorded.Frames)/1e6, record.DefaultSize>>20)
		if memory > 60e6 {
			t.Errorf("%s: %.1f MB resident, want 60 at most", what, memory/1e6)
		}
		if took > 0.01 {
			t.Errorf("%s: %.2f %% of a CPU, want 1 at most", what, 100*took)
		}
		if now.Bytes > record.DefaultSize {
			t.Errorf("%s: %d bytes on disk", what, now.Bytes)
		}
	}
	measure("idle")
	for i := range busy {
		h.Must(t, "exec", "-d", fmt.Sprintf("box-%d", i), "ping", "-i", "0.01", "-s", "1000", "10.213.255.1")
	}
	measure(fmt.Sprintf("%d send and receive", busy))
	h.agent.stop()
}
