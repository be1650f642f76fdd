package e2e

import (
	"fmt"
	"os"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// TestIdle runs many containers that do nothing. At first the agent only observes them, then it
// isolates some. When they have gone, it holds what it held before them.
func TestIdle(t *testing.T) {
	n := testkit.Scale(t, 20, 100)
	r := newRig(t)
	a := r.agent()
	a.start()
	alone := a.footprint()
	for i := range n {
		r.add(sandbox.Spec{Name: fmt.Sprintf("e2e-%d", i)})
	}
	// The agent keeps accounts for a container as soon as it has finished with it.
	for _, b := range r.boxes {
		a.reaches(b.Name, api.StateDone)
	}
	observing := a.footprint()
	t.Logf("the agent holds %+v by itself, %+v with %d containers", alone, observing, n)
	for _, step := range []struct {
		mode, names string
		want        int
	}{{"observe", "e2e-*", n}, {"isolate", "e2e-*5", n / 10}} {
		mode := step.mode
		a.policy("all.yaml", "match: {name: \""+step.names+"\"}\nset: {netcpu: "+mode+"}\n")
		await(t, "all to be at "+mode, func() error {
			list, err := a.api.Containers(t.Context())
			if err != nil {
				return err
			}
			at := 0
			for _, c := range list {
				for _, s := range c.Policy {
					if s.Key == "fairlead.netcpu" && s.Value == mode && s.From != "default" && netcpuOf(c).State == api.StateDone {
						at++
					}
				}
			}
			if at != step.want {
				return fmt.Errorf("%d of %d are", at, step.want)
			}
			return nil
		})
	}
	must(t, os.Remove(a.path("policy.d/all.yaml")))
	a.idles(observing)
	for _, b := range r.boxes {
		must(t, b.Destroy())
	}
	a.idles(alone)
	a.stop()
}
