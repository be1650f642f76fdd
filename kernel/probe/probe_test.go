package probe

import (
	"context"
	"encoding/json"
	"testing"
	"time"
)

func TestShow(t *testing.T) {
	start := time.Now()
	r := Run(context.Background(), Config{})
	t.Log(time.Since(start))
	for _, f := range r {
		b, _ := json.Marshal(f)
		t.Log(string(b))
	}
}
