package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestTerminal(t *testing.T) {
	if Terminal(new(bytes.Buffer)) {
		t.Error("a buffer is a terminal")
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	testkit.Must(t, err)
	defer f.Close()
	if Terminal(f) {
		t.Error("a file is a terminal")
	}
}
