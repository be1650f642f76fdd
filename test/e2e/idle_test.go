package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
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

// TestSelf lets containers ask about themselves.
func TestSelf(t *testing.T) {
	r := newRig(t)
	one := r.add(sandbox.Spec{Name: "e2e-one", Labels: map[string]string{"fairlead.netcpu": "isolate"}})
	two := r.add(sandbox.Spec{Name: "e2e-two"})
	a := r.agent()
	a.start()
	a.isolated("e2e-one", 1)
	a.reaches("e2e-two", api.StateDone)
	ask := func(socket string, b *sandbox.Box) (string, error) {
		t.Helper()
		cmd := exec.Command("/proc/self/exe", askSelfVerb, a.path(socket))
		var out strings.Builder
		cmd.Stdout = &out
		p, err := b.Start(cmd)
		must(t, err)
		err = p.Wait()
		return out.String(), err
	}
	for _, b := range []*sandbox.Box{one, two} {
		c, err := a.find(b.Name)
		must(t, err)
		text, err := ask("self.sock", b)
		if err != nil {
			t.Fatalf("%s: %v: %s", b.Name, err, text)
		}
		var self api.Self
		must(t, json.Unmarshal([]byte(text), &self))
		if self.Name != b.Name || self.ID != c.ID {
			t.Errorf("%s is told of %s (%d)", b.Name, self.Name, self.ID)
		}
		other := map[string]string{"e2e-one": "e2e-two", "e2e-two": "e2e-one"}[b.Name]
		o, err := a.find(other)
		must(t, err)
		for _, secret := range []string{other, o.ID.String(), "/sys/fs/cgroup", a.dir} {
			if strings.Contains(text, secret) {
				t.Errorf("%s is told of %q: %s", b.Name, secret, text)
			}
		}
		for _, f := range self.Measured {
			for _, s := range f.Samples {
				if s.Container != c.ID {
					t.Errorf("%s is told what was measured of %d", b.Name, s.Container)
				}
			}
		}
	}
	// A process of the host is no container, and the socket serves nothing else.
	if out := askSelfHere(t, a.path("self.sock")); !strings.Contains(out, "no container") {
		t.Errorf("a process of the host is told %s", out)
	}
	self := api.Dial(a.path("self.sock"))
	defer self.Close()
	if list, err := self.Containers(t.Context()); err == nil {
		t.Errorf("the self socket lists %+v", list)
	}
	if done, err := self.Restore(t.Context(), ""); err == nil {
		t.Errorf("the self socket restores %+v", done)
	}
	a.isolated("e2e-one", 1)
	a.stop()
}

func askSelfHere(t *testing.T, socket string) string {
	t.Helper()
	c := api.Dial(socket)
	defer c.Close()
	self, err := c.Self(t.Context())
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%+v", self)
}
