package api

import (
	"encoding/json"
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

func FuzzParseStream(f *testing.F) {
	for _, s := range []string{"", "id: 1\ndata: {}\n\n", "event: state\ndata\n\n", ": c\n\n", "data: 1\ndata: 2\nid: 18446744073709551615\n\n", "id: -1\n\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n := 0
		if err := parseStream(strings.NewReader(s), func(e streamed) bool {
			if _, ok := e.Data.(json.RawMessage); !ok {
				t.Fatalf("%+v", e)
			}
			n++
			return n < 3
		}); err == nil && n > 3 {
			t.Fatal("it went on")
		}
	})
}
