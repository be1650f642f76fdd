package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

func (r *rig) put(ref string, in api.SetRequest) error {
	r.t.Helper()
	_, err := r.client.Set(r.t.Context(), ref, in)
	return err
}

func code(err error) string {
	var e *api.Error
	errors.As(err, &e)
	if e == nil {
		return ""
	}
	return e.Code
}

func sets(kv ...string) api.SetRequest {
	in := api.SetRequest{Set: map[string]string{}}
	for i := 0; i < len(kv); i += 2 {
		in.Set[kv[i]] = kv[i+1]
	}
	return in
}

// written is what the file has.
func (r *rig) written() (out []policy.Override) {
	r.t.Helper()
	data, err := os.ReadFile(filepath.Join(r.state, "set.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var f overridesFile
	if err == nil {
		err = json.Unmarshal(data, &f)
	}
	testkit.Must(r.t, err)
	return f.Set
}

// byPolicy is what an explanation says of a container's policy, defaults apart.
func byPolicy(x api.Explanation) []api.Setting {
	return slices.DeleteFunc(slices.Clone(x.Container.Policy), func(s api.Setting) bool { return s.From == "default" })
}

func TestSet(t *testing.T) {
	r := newRig(t, 1, 2)
	r.start()
	r.set.set(true, box(1, ""), box(2, ""))
	r.until("both are there", func() bool { return r.state1(1) == api.StateDone && r.state1(2) == api.StateDone })
	testkit.Must(t, r.put("box-1", sets("fairlead.netcpu", "isolate")))
	// Set returns when it is in force.
	if got := r.host.get(t, 1); got != "isolated" {
		t.Errorf("after set it is %q", got)
	}
	x, err := r.client.Explain(t.Context(), "box-1")
	testkit.Must(t, err)
	if p := byPolicy(x); len(p) != 1 || !strings.HasPrefix(p[0].From, "set by uid 0 at 2") || len(x.Changes) != 1 || len(x.Changes[0].Because) != 1 {
		t.Errorf("explained as %+v, %+v", p, x.Changes)
	}

	for _, tt := range []struct {
		ref        string
		in         api.SetRequest
		code, says string
	}{
		{"nobody", sets("netcpu", "isolate"), "not_found", "nobody"},
		{"box-2", api.SetRequest{}, "bad_request", "nothing is to be set"},
		{"box-2", sets("netcpu", "isolat"), "bad_request", `netcpu: "isolat": must be one of`},
		{"box-2", sets("netcpu", "isolate", "netcup", "isolate"), "bad_request", "did you mean netcpu?"},
		{"box-2", sets("netcpu", "isolate", "fairlead.netcpu", "observe"), "bad_request", "netcpu: is given twice"},
		{"box-2", sets("netcpu", "isolate", "net.rate", "1tb"), "bad_request", "net.rate"},
		{"box-2", api.SetRequest{Unset: []string{"netcpu"}}, "bad_request", "netcpu: is not set by hand"},
		{"box-1", api.SetRequest{Set: map[string]string{"netcpu": "observe"}, Unset: []string{"netcpu"}}, "bad_request", "twice"},
	} {
		if err := r.put(tt.ref, tt.in); code(err) != tt.code || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s %+v: %v (%s), want %s: %s", tt.ref, tt.in, err, code(err), tt.code, tt.says)
		}
	}
	if got := r.host.get(t, 2); got != "plain" || len(r.written()) != 1 {
		t.Errorf("after refusals 2 is %q, and written down is %+v", got, r.written())
	}

	testkit.Must(t, r.put("box-1", api.SetRequest{Unset: []string{"netcpu"}}))
	if got := r.host.get(t, 1); got != "plain" || len(r.written()) != 0 {
		t.Errorf("taken back, it is %q, and written down is %+v", got, r.written())
	}
}

// What a feature refuses is not in force, not even in part, and not written.
func TestSetRefused(t *testing.T) {
	r := newRig(t, 1)
	r.start()
	r.set.set(true, box(1, ""))
	r.until("it is there", func() bool { return r.state1(1) == api.StateDone })
	r.feature.apply = func(_ context.Context, x policy.Target) error {
		if x.Settings.NetCPU == policy.NetCPUIsolate {
			return errors.New("the sum of 2 is 1.2gbit")
		}
		return nil
	}
	err := r.put("1", sets("netcpu", "isolate", "net.weight", "2"))
	if code(err) != "refused" || !strings.Contains(err.Error(), "the sum of 2 is 1.2gbit") {
		t.Errorf("refused with %v (%s)", err, code(err))
	}
	if got := r.state1(1); got != api.StateDone || r.host.get(t, 1) != "plain" || len(r.written()) != 0 {
		t.Errorf("after a refusal it is %s, %q, and written down is %+v", got, r.host.get(t, 1), r.written())
	}
	x, err := r.client.Explain(t.Context(), "1")
	if err != nil || len(byPolicy(x)) != 0 || len(x.Container.Policy) == 0 {
		t.Errorf("policy after a refusal: %+v (%v)", x.Container.Policy, err)
	}
	// Nor is what no feature would put in force.
	testkit.Must(t, testkit.Err(r.client.Restore(t.Context(), "1")))
	if err := r.put("1", sets("netcpu", "observe")); code(err) != "refused" || !strings.Contains(err.Error(), "policy reload") {
		t.Errorf("set while restore holds it: %v", err)
	}
}

// What is set for one container of a pod waits until it is set for the others.
func TestSetForAPod(t *testing.T) {
	r := newRig(t, 1, 2)
	r.start()
	a, b := box(1, ""), box(2, "")
	a.NetNS, b.NetNS = 5, 5
	r.set.set(true, a, b)
	r.until("both are there", func() bool { return r.state1(1) == api.StateDone && r.state1(2) == api.StateDone })
	both := false
	r.feature.apply = func(_ context.Context, x policy.Target) error {
		both = both || x.Container.ID == 2 && x.Settings.NetCPU == policy.NetCPUIsolate
		if x.Settings.NetCPU == policy.NetCPUIsolate && !both {
			return fmt.Errorf("test: %w: container 2", feature.ErrDisagree)
		}
		return nil
	}
	done, err := r.client.Set(t.Context(), "1", sets("netcpu", "isolate"))
	testkit.Must(t, err)
	if f := done.Features[0]; f.State != api.StateError || !strings.Contains(f.Error, "container 2") || len(r.written()) != 1 {
		t.Errorf("set for the first: %+v", f)
	}
	testkit.Must(t, r.put("2", sets("netcpu", "isolate")))
	r.untilValue(2, "isolated")
	r.untilValue(1, "isolated")
}

// It outlives the agent, but not the container, nor the boot.
func TestSetSurvives(t *testing.T) {
	r := newRig(t, 1, 2)
	r.start()
	r.set.set(true, box(1, ""), box(2, ""))
	r.until("both are there", func() bool { return r.state1(1) == api.StateDone && r.state1(2) == api.StateDone })
	for _, ref := range []string{"1", "2"} {
		testkit.Must(t, r.put(ref, sets("netcpu", "isolate")))
	}
	was := r.written()
	testkit.Must(t, r.stop())
	if got := r.host.get(t, 1); got != "plain" {
		t.Errorf("without an agent it is %q", got)
	}
	r.start()
	r.untilValue(1, "isolated")
	r.untilValue(2, "isolated")
	testkit.Same(t, "written down", was, r.written())
	// While not all is known, nothing is forgotten.
	r.set.set(false, box(1, ""))
	r.until("2 has gone", func() bool { return r.state1(2) == "" })
	r.untilValue(2, "plain")
	if len(r.written()) != 2 {
		t.Errorf("forgotten too early: %+v", r.written())
	}
	r.set.says(true, box(1, ""))
	rounds := r.agent.roundsMade()
	r.until("some rounds more", func() bool { r.agent.nudge(); return r.agent.roundsMade() > rounds+3 })
	if len(r.written()) != 2 {
		t.Errorf("forgotten while a runtime has not answered about all: %+v", r.written())
	}
	r.set.set(true, box(1, ""))
	r.until("2 is forgotten", func() bool { return len(r.written()) == 1 })
	r.feature.took()
	r.set.set(true, box(1, ""), box(2, ""))
	first := ""
	r.until("2 is there again", func() bool {
		for _, call := range r.feature.took() {
			if first == "" && strings.HasPrefix(call, "apply 2 ") {
				first = call
			}
		}
		return first != ""
	})
	if first == "apply 2 isolate" { // not even for a moment
		t.Error("what was set by hand for the last container of this id is applied to a new one")
	}
	testkit.Must(t, r.stop())

	// Of another boot: no running container can be meant.
	file := filepath.Join(r.state, "set.json")
	data, err := os.ReadFile(file)
	testkit.Must(t, err)
	boot, err := journal.BootID("/proc")
	testkit.Must(t, err)
	data = bytes.Replace(data, []byte(boot), []byte("another"), 1)
	for _, content := range [][]byte{data, []byte(`{"boot":`)} {
		testkit.Must(t, os.WriteFile(file, content, 0o600))
		r.start()
		r.until("1 is there", func() bool { return r.state1(1) == api.StateDone })
		if got := r.host.get(t, 1); got != "plain" {
			t.Errorf("with %.20q in the file it is %q", content, got)
		}
		testkit.Must(t, r.stop())
	}
}

func FuzzOverridesFile(f *testing.F) {
	f.Add([]byte(`{"boot":"x","set":[{"container":"1","key":"net.rate","value":"50mbit","from":"set by uid 0"}]}`))
	f.Add([]byte(`{"set":[{"container":"-1"},null,{"key":"net.rate"}]}`))
	f.Add([]byte("{"))
	store := policy.NewStore(f.TempDir(), nil)
	f.Fuzz(func(t *testing.T, data []byte) {
		file := Config{StateDir: t.TempDir()}.overrides()
		testkit.Must(t, os.WriteFile(file.Path, data, 0o600))
		var in overridesFile
		if _, err := file.Read(&in); err == nil {
			store.Override(in.Set)
			store.Resolve([]container.Container{box(1, "")})
		}
	})
}
