package rules

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestAgentDrawsNothing checks that neither the agent nor what it imports, however far, is a view or
// the library of the diagrams, which only view/plot imports.
func TestAgentDrawsNothing(t *testing.T) {
	const library = "github.com/go-analyze/charts"
	out, err := exec.Command("go", "list", "-deps", module+"/agent").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	list := strings.Fields(string(out))
	if !slices.Contains(list, module+"/agent") {
		t.Fatalf("go list: %q", list)
	}
	for _, dep := range list {
		if in(below(dep), "view") || in(dep, library) {
			t.Errorf("agent depends on %s", below(dep))
		}
	}
	for _, p := range packages(t) {
		if p.name() != "view/plot" && slices.ContainsFunc(p.Imports, func(imp string) bool { return in(imp, library) }) {
			t.Errorf("%s imports %s: diagrams are drawn in view/plot only", p.name(), library)
		}
	}
}
