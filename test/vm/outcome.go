package vm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
)

// outcome is the result of a test, its time in seconds, and its output.
type outcome struct {
	test, action, output string
	seconds              float64
}

// outcomes returns the tests of a run that ended, in that order, and the output beside them.
func (r Run) outcomes() (ended []outcome, rest string, err error) {
	cmd := exec.Command("go", "tool", "test2json", "-t") // with the times
	cmd.Stdin = bytes.NewReader(r.Output)
	out, err := cmd.Output()
	if err != nil {
		return nil, "", fmt.Errorf("go tool test2json: %w", err)
	}
	output := make(map[string]string)
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var e struct {
			Action, Test, Output string
			Elapsed              float64
		}
		if err := dec.Decode(&e); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, "", fmt.Errorf("output of go tool test2json: %w", err)
		}
		switch {
		case e.Action == "output":
			output[e.Test] += e.Output
		case e.Test != "" && (e.Action == "pass" || e.Action == "fail" || e.Action == "skip"):
			ended = append(ended, outcome{e.Test, e.Action, output[e.Test], e.Elapsed})
			delete(output, e.Test)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(output)) {
		rest += output[name]
	}
	return ended, rest, nil
}

// completed reports whether all tests ran and some failed, and nothing else went wrong: 2 is the
// status of a panic, 124 that of a timeout.
func (r Run) completed() bool {
	return r.Status == "1" && !bytes.Contains(r.Output, []byte("these are left after the tests")) // see testkit.Run
}

// tail returns the last n lines of a text.
func tail(text []byte, n int) []byte {
	lines := bytes.SplitAfter(bytes.TrimSpace(text), []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-n):], nil)
}
