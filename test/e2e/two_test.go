package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestTwoAgents starts a second agent in a network namespace, with directories of its own, and in a
// mount namespace of its own, as in a container. It names the agent that it would disturb, and ends.
func TestTwoAgents(t *testing.T) {
	testkit.NeedRoot(t)
	ns := testkit.NetNS(t)
	first, second := newAgent(t, ns), newAgent(t, ns)
	first.start()
	second.launch("unshare", "--mount", "sh", "-c", `if [ -x /proc/1/root ]; then mount -t tmpfs none /run; fi; exec "$0" "$@"`)
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
