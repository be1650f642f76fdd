package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Text is what an error says to people. Some of Go's own errors name functions of its
// library, or say what only its programmers know; those it puts into words. The rest of
// the text stays as it is.
func Text(err error) string {
	if err == nil {
		return ""
	}
	text := err.Error()
	for _, part := range parts(err, nil) {
		if said := wordsFor(part); said != "" {
			text = strings.ReplaceAll(text, part.Error(), said)
		}
	}
	return text
}

// parts appends err and all that it wraps, the outermost first.
func parts(err error, list []error) []error {
	list = append(list, err)
	switch x := err.(type) {
	case interface{ Unwrap() error }:
		if inner := x.Unwrap(); inner != nil {
			return parts(inner, list)
		}
	case interface{ Unwrap() []error }:
		for _, inner := range x.Unwrap() {
			list = parts(inner, list)
		}
	}
	return list
}

// wordsFor gives the words for one of Go's errors, or "" for any other.
func wordsFor(err error) string {
	if x, ok := err.(*strconv.NumError); ok {
		what := "a whole number"
		switch {
		case errors.Is(x.Err, strconv.ErrRange):
			return fmt.Sprintf("%q is out of range", x.Num)
		case x.Func == "ParseBool":
			what = "true or false"
		case x.Func == "ParseFloat":
			what = "a number"
		}
		return fmt.Sprintf("%q is not %s", x.Num, what)
	}
	switch err {
	case context.Canceled:
		return "interrupted"
	case context.DeadlineExceeded:
		return "it took too long"
	case io.ErrUnexpectedEOF, io.EOF:
		return "the connection was closed"
	}
	return ""
}
