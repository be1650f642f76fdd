package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"testing"
)

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
