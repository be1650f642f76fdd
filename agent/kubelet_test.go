package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// guarantor is a feature that guarantees something.
type guarantor struct {
	*fake
	all map[string]uint64
	err error
}

func (g guarantor) Guarantees() (map[string]uint64, error) { return g.all, g.err }

// TestGuaranteesKept has a feature that cannot tell for a while what it guarantees, and one resource
// that it no longer has.
func TestGuaranteesKept(t *testing.T) {
	f := guarantor{fake: newFake()}
	w := newWorker(f, ordinary(), quiet(), func() {})
	began := time.Unix(1000, 0)
	var g guaranteed
	for _, step := range []struct {
		after time.Duration
		all   map[string]uint64
		err   error
		want  map[string]int
		why   string
	}{
		{0, nil, errors.New("not yet"), map[string]int{}, ""},
		{time.Second, map[string]uint64{"egress-mbit": 950, "data-riops": 20}, nil, map[string]int{"egress-mbit": 950, "data-riops": 20}, ""},
		{2 * time.Second, map[string]uint64{"egress-mbit": 900}, errors.New("disk data: gone"), map[string]int{"egress-mbit": 900, "data-riops": 20}, ""},
		{3 * time.Second, nil, errors.New("list uplinks: interrupted"), map[string]int{"egress-mbit": 900, "data-riops": 20}, "list uplinks: interrupted"},
		{2*time.Second + keepTime, nil, errors.New("no uplink is up"), map[string]int{"egress-mbit": 900, "data-riops": 0}, "no uplink is up"},
		{3*time.Second + keepTime, nil, errors.New("no uplink is up"), map[string]int{"egress-mbit": 0, "data-riops": 0}, "no uplink is up"},
		{4*time.Second + keepTime, map[string]uint64{"egress-mbit": 9}, nil, map[string]int{"egress-mbit": 9, "data-riops": 0}, ""},
		{5*time.Second + keepTime, nil, nil, map[string]int{"egress-mbit": 0, "data-riops": 0}, ""},
	} {
		f.all, f.err = step.all, step.err
		g.ask(w, f, began.Add(step.after))
		testkit.Same(t, fmt.Sprintf("after %v", step.after), step.want, g.amounts())
		if why := fmt.Sprint(g.why("egress-mbit")); step.why == "" && why != "<nil>" || !strings.Contains(why, step.why) {
			t.Errorf("after %v: %s, want %q", step.after, why, step.why)
		}
	}
}

// TestOffered has a feature that guarantees more of one thing than kubelet is offered, while there
// is no kubelet.
func TestOffered(t *testing.T) {
	dir := t.TempDir()
	testkit.Must(t, os.Mkdir(filepath.Join(dir, "device-plugins"), 0o755))
	r := newRig(t)
	a := &Agent{cfg: Config{KubeletDir: dir}, log: quiet(), pace: ordinary()}
	a.workers = []*worker{
		newWorker(newFake(), ordinary(), a.log, func() {}),
		newWorker(guarantor{newFake(), map[string]uint64{"egress-mbit": 950, "ingress-mbit": 400_000}, nil}, ordinary(), a.log, func() {}),
	}
	p := a.offers()
	stop := testkit.Background(t, p.Run)
	r.until("both are offered", func() bool { return len(p.Offers()) == 2 && p.Offers()[1].Amount > 0 })
	testkit.Check(t, stop())
	got := make(map[string]string)
	for _, f := range offered(p, &a.guaranteed, nil) {
		if f.Area != "kubelet" || f.Level != probe.Degraded || !strings.Contains(f.Why, "not asked") {
			t.Errorf("%+v", f)
		}
		got[f.Capability] = f.Detail
	}
	testkit.Same(t, "offers", map[string]string{"fairlead.dev/egress-mbit": "950", "fairlead.dev/ingress-mbit": "10000"}, got)
	if nothing := offered((&Agent{cfg: a.cfg, log: a.log}).offers(), &guaranteed{}, nil); len(nothing) != 1 || nothing[0].Mend == "" {
		t.Errorf("nothing is offered: %+v", nothing)
	}
	if (&Agent{}).offers() != nil || offered(nil, nil, nil) != nil || pods(Config{}) != nil {
		t.Error("kubelet is spoken to, and nobody asked for that")
	}
}

// TestStatus has a source of pods beside one of containers, and a label that cannot be used.
func TestStatus(t *testing.T) {
	r := newRig(t, 1)
	r.set.set(true, box(1, "isolat"))
	r.set.snap.Sources = []discover.SourceStatus{{Name: "cri-o", Listed: true, Records: 4}, {Name: "kubelet", Listed: true, Records: 3, Pods: true}}
	r.start()
	var st api.Status
	r.until("the problem is told", func() bool {
		var err error
		st, err = r.client.Status(t.Context())
		return err == nil && len(st.Policy.Problems) == 1
	})
	if !st.Complete || st.Containers != 1 || st.Version.Version != "test" || len(st.Features) != 1 || st.Features[0].Support.Level != api.LevelFull {
		t.Errorf("%+v", st)
	}
	want := []api.SourceStatus{{Name: "cri-o", Ready: true, Containers: 4}, {Name: "kubelet", Ready: true}}
	testkit.Same(t, "sources", want, st.Sources)
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
