package api

import (
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestNoAgent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none")
	_, err := Dial(path).Version(t.Context())
	if !errors.Is(err, ErrNoAgent) || !errors.Is(err, syscall.ENOENT) || !strings.HasPrefix(err.Error(), "no agent answers at "+path+": ") {
		t.Errorf("%v", err)
	}
}
