package agent

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// TestFrame: a frame has the containers and the report of the feature, and the agent makes an
// overview of two of its own.
func TestFrame(t *testing.T) {
	r := newRig(t, 7)
	r.set.set(true, box(7, ""))
	r.view = 10 * time.Millisecond
	r.start()
	f, err := r.client.Frame(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(f.Containers) != 1 || f.Containers[0].ID != 7 || f.Taken.IsZero() {
		t.Errorf("the frame has %+v of %v, want container 7", f.Containers, f.Taken)
	}
	var o api.Overview
	r.until("there is an overview", func() bool {
		o, err = r.client.Overview(t.Context())
		return err == nil && len(o.Rows) == 1
	})
	if o.Rows[0].Container != 7 || !o.Taken.After(o.Since) {
		t.Errorf("the overview is %+v", o)
	}
}
