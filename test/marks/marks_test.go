package marks

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFile(t *testing.T) {
	const head = "package a\nfunc TestA(t *testing.T) {\n"
	for _, tt := range []struct {
		name, src string
		want      []Test
		err       string
	}{
		{"none", head + "f()\n}\n", nil, ""},
		{"smoke", head + "testkit.Smoke(t, \"bpf:feature/x\", \"path:bridge\")\nf()\n}\n",
			[]Test{{Name: "TestA", Mark: "Smoke", Covers: []string{"bpf:feature/x", "path:bridge"}}}, ""},
		{"on kernels", head + "testkit.OnKernels(t)\n}\n", []Test{{Name: "TestA", Mark: "OnKernels"}}, ""},
		{"in full", head + "testkit.InFull(t)\n}\n", []Test{{Name: "TestA", Mark: "InFull"}}, ""},
		{"no mark", head + "testkit.NeedRoot(t)\n}\n", nil, ""},
		{"late", head + "f()\ntestkit.Smoke(t)\n}\n", nil, "first statement"},
		{"in a subtest", head + "t.Run(\"x\", func(t *testing.T) { testkit.Smoke(t) })\n}\n", nil, "first statement"},
		{"not in a test", "package a\nfunc f(t *testing.T) {\ntestkit.OnKernels(t)\n}\n", nil, "first statement"},
		{"variable", head + "testkit.Smoke(t, x)\n}\n", nil, "string literal"},
		{"unknown kind", head + "testkit.Smoke(t, \"qdisc:htb\")\n}\n", nil, "want bpf:FOLDER"},
		{"unknown path", head + "testkit.Smoke(t, \"path:moon\")\n}\n", nil, "the paths are"},
		{"empty", head + "testkit.Smoke(t, \"bpf:\")\n}\n", nil, "want bpf:FOLDER"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := file("a_test.go", tt.src)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got error %v, want %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
