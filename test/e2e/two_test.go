package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestTwoAgents starts a second agent in a network namespace, with directories of its own. It names
// the agent that it would disturb, and ends.
func TestTwoAgents(t *testing.T) {
	testkit.NeedRoot(t)
	ns := testkit.NetNS(t)
	first, second := newAgent(t, ns), newAgent(t, ns)
	first.start()
	second.launch()
	<-second.ended
	log, err := os.ReadFile(second.path("log"))
	must(t, err)
	if want := fmt.Sprintf("another agent works in this network namespace: process %d", first.pid); second.err == nil || !strings.Contains(string(log), want) {
		t.Errorf("it ended with %v, and said %s; want %q", second.err, log, want)
	}
	first.kill() // then its place is free
	second.start()
	second.stop()
}
