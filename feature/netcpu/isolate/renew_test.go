package isolate

import (
	"os"
	"testing"

	"github.com/fairlead-project/fairlead/kernel/sched"
)

func TestLives(t *testing.T) {
	if (&isolation{}).lives("/proc") {
		t.Error("a tenant without threads has some that live")
	}
	ended := &isolation{threads: []thread{{Thread: sched.Thread{TID: os.Getpid(), Start: 1}}}}
	if ended.lives("/proc") {
		t.Error("a number that is another's by now lives")
	}
}
