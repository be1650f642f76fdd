package e2e

import (
	"fmt"
	"path/filepath"
	"testing"
	"unicode"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// broken are policy files that no agent can use, with the expected messages. Package policy has all
// others.
var broken = []struct{ name, text, says string }{
	{"unknown key", "match: {name: x}\nset:\n  netcpu: isolate\n  netcup: isolate\n", ":4:3: netcup: unknown key; did you mean netcpu?"},
	{"not text", "match: {name: \"\x1b[31m\xff\xfe\"}\nset: {netcpu: isolate}\n", ":"},
}

// TestBrokenPolicy gives the agent unusable policy files. The agent reports where and why, and the
// last good policy stays in force. Without isolation only what observing needs is left; without the
// agent, nothing.
func TestBrokenPolicy(t *testing.T) {
	r := newRig(t)
	r.add(sandbox.Spec{Name: "e2e-box"})
	before := r.state()
	a := r.agent()
	a.start()
	a.reaches("e2e-box", api.StateDone)
	observed := r.state()
	a.policy("good.yaml", isolateAll)
	i := a.isolated("e2e-box", 1)
	isolated := r.state()
	stands := func(when string) {
		t.Helper()
		if now := a.isolated("e2e-box", 1); now.changes != i.changes || now.threads[0] != i.threads[0] {
			t.Errorf("%s it is %+v, was %+v", when, now, i)
		}
		r.sameAs(isolated, when)
	}
	bad := filepath.Join(a.path("policy.d"), "bad.yaml")
	for _, b := range broken {
		t.Run(b.name, func(t *testing.T) {
			a.t = t
			a.policy("bad.yaml", b.text)
			// The agent gets no signal; it notices the file.
			await(t, "the agent to notice", func() error {
				if st := a.status(); st.Policy.OK || st.Policy.Error == "" {
					return fmt.Errorf("policy %+v", st.Policy)
				}
				return nil
			})
			stands("with a broken policy")
			for _, o := range []output{a.run("policy", "reload"), fairlead(t, "policy", "check", bad), a.run("ps")} {
				quiet(t, o)
			}
			mustSay(t, a.run("policy", "reload"), 1, "last good one is in force", "bad.yaml", b.says)
			check := fairlead(t, "policy", "check", bad)
			mustSay(t, check, 1, "bad.yaml", b.says)
			mustSay(t, a.run("ps"), 0, "last good one is in force", "bad.yaml", "e2e-box")
			a.policy("bad.yaml", "")
			await(t, "the agent to be content", func() error {
				if st := a.status(); !st.Policy.OK {
					return fmt.Errorf("policy %+v", st.Policy)
				}
				return nil
			})
			stands("with a good policy again")
		})
	}
	a.t = t

	// By hand: all of it or nothing.
	mustSay(t, a.run("set", "e2e-box", "netcpu=observe", "netcpu.steal=101%"), 1, "netcpu.steal: \"101%\": must not be more than 100%")
	stands("after a bad setting by hand")

	// A good change takes effect.
	a.policy("good.yaml", "match: {name: e2e-box}\nset: {netcpu: observe}\n")
	await(t, "observe to be in force", func() error {
		if n := a.status().Changes; n != 0 {
			return fmt.Errorf("%d changes", n)
		}
		return nil
	})
	r.sameAs(observed, "without isolation")
	a.stop()
	r.sameAs(before, "without the agent")
}

// quiet fails the test if a text could drive a terminal.
func quiet(t *testing.T, o output) {
	t.Helper()
	for _, text := range []string{o.out, o.err} {
		for i, c := range text {
			if c != '\n' && !unicode.IsPrint(c) {
				t.Errorf("%q is printed, in %q", c, text[max(0, i-60):min(len(text), i+60)])
				return
			}
		}
	}
}
