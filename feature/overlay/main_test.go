package overlay

import (
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
)

func TestMain(m *testing.M) {
	topology.Reexec(faults.Reexec(topology.Subject(subject)))
	testkit.Main(m)
}
