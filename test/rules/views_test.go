package rules

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestAgentDrawsNothing checks that neither the agent nor what it imports, however far, is a view.
func TestAgentDrawsNothing(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", module+"/agent").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	list := strings.Fields(string(out))
	if !slices.Contains(list, module+"/agent") {
		t.Fatalf("go list: %q", list)
	}
	for _, dep := range list {
		if in(below(dep), "view") {
			t.Errorf("agent depends on %s", below(dep))
		}
	}
}
