package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// knowledge is what the lists state before a run.
type knowledge struct {
	skips  []expectation
	bounds map[string]time.Duration // by package; "*" is the default
}

// expectation is an accepted skip.
type expectation struct {
	pattern *regexp.Regexp // of "PACKAGE TEST: REASON"
	why     string
}

// readLists reads the lists in a folder.
func readLists(dir string) (k knowledge, err error) {
	for _, list := range []struct {
		name string
		take func(entry, why string) error
	}{
		{"expected-skips.txt", func(entry, why string) error {
			x, err := expect(entry, why)
			k.skips = append(k.skips, x)
			return err
		}},
		{"bounds.txt", func(entry, why string) error {
			name, seconds, _ := strings.Cut(entry, " ")
			n, err := strconv.Atoi(strings.TrimSpace(seconds))
			if err != nil || n <= 0 {
				return fmt.Errorf("want PACKAGE SECONDS")
			}
			if k.bounds == nil {
				k.bounds = make(map[string]time.Duration)
			}
			k.bounds[name] = time.Duration(n) * time.Second
			return nil
		}},
	} {
		name := filepath.Join(dir, list.name)
		data, err := os.ReadFile(name)
		if err != nil {
			return k, err
		}
		if err := eachEntry(name, string(data), list.take); err != nil {
			return k, err
		}
	}
	return k, nil
}

// eachEntry calls take for each line of a list: an entry, two spaces, "# ", and the reason. Empty
// lines and lines that begin with # are comments.
func eachEntry(name, data string, take func(entry, why string) error) error {
	n := 0
	for line := range strings.Lines(data) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		entry, why, ok := strings.Cut(line, "  # ")
		if why = strings.TrimSpace(why); !ok || why == "" {
			return fmt.Errorf("%s:%d: no reason: want an entry, two spaces, # and the reason", name, n)
		}
		if err := take(strings.TrimSpace(entry), why); err != nil {
			return fmt.Errorf("%s:%d: %w", name, n, err)
		}
	}
	return nil
}

func expect(entry, why string) (expectation, error) {
	re, err := regexp.Compile("^(?:" + entry + ")$")
	return expectation{pattern: re, why: why}, err
}

// match returns the first expectation that matches a line.
func match(list []expectation, line string) (expectation, bool) {
	for _, x := range list {
		if x.pattern.MatchString(line) {
			return x, true
		}
	}
	return expectation{}, false
}
