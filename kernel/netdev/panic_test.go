package netdev

import (
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// A panic inside a namespace comes to who has called Do, where it can be contained.
func TestPanicInNamespace(t *testing.T) {
	ns := open(t, testkit.NetNS(t).Path)
	defer func() {
		p, ok := recover().(*Panic)
		if !ok || p.Value != "inside" || !strings.Contains(string(p.Stack), "TestPanicInNamespace") {
			t.Errorf("Do panicked with %v", p)
		}
		if err := ns.Do(func() error { return nil }); err != nil { // nothing is left locked
			t.Errorf("Do after that: %v", err)
		}
	}()
	ns.Do(func() error { panic("inside") })
}
