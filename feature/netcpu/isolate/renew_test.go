package isolate

import (
	"os"
	"testing"

	"github.com/fairlead-project/fairlead/kernel/sched"
)

func TestLives(t *testing.T) {
	if live("/proc", nil) {
		t.Error("a tenant without threads has some that live")
	}
	ended := []thread{{Thread: sched.Thread{TID: os.Getpid(), Start: 1}}}
	if live("/proc", ended) {
		t.Error("a number that is another's by now lives")
	}
}
