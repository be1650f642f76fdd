package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestTerminal(t *testing.T) {
	if Terminal(new(bytes.Buffer)) {
		t.Error("a buffer is a terminal")
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if Terminal(f) {
		t.Error("a file is a terminal")
	}
}
