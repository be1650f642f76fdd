package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
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
		if err := parseStream(strings.NewReader(s), func(string, []byte) bool {
			n++
			return n < 3
		}); err == nil && n > 3 {
			t.Fatal("it went on")
		}
	})
}

// Whoever reads an error has not written Go.
func TestText(t *testing.T) {
	_, number := strconv.ParseUint("x1", 10, 64)
	_, big := strconv.ParseUint("99999", 10, 8)
	_, truth := strconv.ParseBool("maybe")
	for want, err := range map[string]error{
		"":         nil,
		"as it is": errors.New("as it is"),
		`queue: "x1" is not a whole number; again: "99999" is out of range`: fmt.Errorf("queue: %w; again: %w", number, big),
		`"maybe" is not true or false`:                                      truth,
		"interrupted":                                                       context.Canceled,
		"set eth0: it took too long\nand: interrupted":                      errors.Join(fmt.Errorf("set eth0: %w", context.DeadlineExceeded), fmt.Errorf("and: %w", context.Canceled)),
		"answer: the connection was closed":                                 fmt.Errorf("answer: %w", io.ErrUnexpectedEOF),
	} {
		if got := Text(err); got != want {
			t.Errorf("%v: %q, want %q", err, got, want)
		}
	}
}
