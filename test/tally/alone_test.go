package main

import (
	"bytes"
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "turns")
	var out bytes.Buffer
	first, err := alone(t.Context(), path, &out)
	if err != nil || out.Len() > 0 {
		t.Fatalf("with nobody else: %v, %q", err, &out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	testkit.Is(t, "beside another run", testkit.Err(alone(ctx, path, &out)), context.DeadlineExceeded)
	if got := bytes.Count(out.Bytes(), []byte("waiting for another run")); got != 1 {
		t.Errorf("said %d times that it waits", got)
	}
	testkit.Must(t, first())
	second, err := alone(t.Context(), path, &out)
	if err != nil {
		t.Fatalf("after the other has ended: %v", err)
	}
	second()
}
