package agent

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// guarantor is a feature that guarantees something.
type guarantor struct {
	*fake
	all map[string]uint64
}

func (g guarantor) Guarantees() map[string]uint64 { return g.all }

// TestOffered has a feature that guarantees more of one thing than kubelet is offered, while there
// is no kubelet.
func TestOffered(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "device-plugins"), 0o755); err != nil {
		t.Fatal(err)
	}
	r := newRig(t)
	a := &Agent{cfg: Config{KubeletDir: dir}, log: quiet()}
	a.workers = []*worker{
		newWorker(newFake(), ordinary(), a.log, func() {}),
		newWorker(guarantor{newFake(), map[string]uint64{"egress-mbit": 950, "ingress-mbit": 400_000}}, ordinary(), a.log, func() {}),
	}
	p := a.offers()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	r.until("both are offered", func() bool { return len(p.Offers()) == 2 && p.Offers()[1].Amount > 0 })
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	got := make(map[string]string)
	for _, f := range offered(p) {
		if f.Area != "kubelet" || f.Level != probe.Degraded || !strings.Contains(f.Why, "not asked") {
			t.Errorf("%+v", f)
		}
		got[f.Capability] = f.Detail
	}
	if d := cmp.Diff(map[string]string{"fairlead.dev/egress-mbit": "950", "fairlead.dev/ingress-mbit": "100000"}, got); d != "" {
		t.Error(d)
	}
	if (&Agent{}).offers() != nil || offered(nil) != nil || pods(Config{}) != nil {
		t.Error("kubelet is spoken to, and nobody asked for that")
	}
}

// TestPodSources has the sources of pods in the status beside those of containers.
func TestPodSources(t *testing.T) {
	r := newRig(t)
	r.set.snap.Sources = []discover.SourceStatus{{Name: "cri-o", Listed: true, Records: 4}, {Name: "kubelet", Listed: true, Records: 3, Pods: true}}
	r.start()
	st, err := r.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []api.SourceStatus{{Name: "cri-o", Ready: true, Containers: 4}, {Name: "kubelet", Ready: true}}
	if d := cmp.Diff(want, st.Sources); d != "" {
		t.Error(d)
	}
}

// TestExplainRequest has a container of a pod that was given bandwidth, and another whose annotation
// says otherwise.
func TestExplainRequest(t *testing.T) {
	r := newRig(t, 7, 8)
	plain, annotated := box(7, ""), box(8, "")
	plain.PodRequests = map[string]uint64{"egress-mbit": 50}
	annotated.PodRequests = plain.PodRequests
	annotated.Labels = map[string]string{"fairlead.net.rate": "9mbit"}
	annotated.Annotations = map[string]bool{"fairlead.net.rate": true}
	r.set.says(false, plain, annotated)
	r.start()
	for ref, want := range map[string]api.Setting{
		"id:7": {Key: "fairlead.net.rate", Value: "50mbit", From: "request of fairlead.dev/egress-mbit"},
		"id:8": {Key: "fairlead.net.rate", Value: "9mbit", From: "annotation"},
	} {
		r.until(ref+" is due it", func() bool {
			e, err := r.client.Explain(t.Context(), ref)
			return err == nil && slices.Contains(e.Container.Policy, want)
		})
	}
}
