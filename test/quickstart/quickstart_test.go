// Package quickstart runs the commands of docs/quickstart.md, word by word, on a fresh copy of the
// repository beside a private Docker Engine. It does not test what the agent does to the host;
// test/e2e does.
package quickstart

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

var must = testkit.Must

func TestMain(m *testing.M) { testkit.Main(m) }

// patience bounds operations that take milliseconds, so that they may take longer on a busy
// machine.
const patience = 90 * time.Second

// step is a block of commands of the guide, and their output according to the guide.
type step struct {
	line           int // of the guide
	commands, says string
}

// steps reads the blocks of commands, which begin with ```sh, and the blocks
// without a language that directly follow them.
func steps(guide string) (list []step) {
	var block *strings.Builder
	var into *string
	followed := false // the line before ended a block of commands
	for n, line := range strings.Split(guide, "\n") {
		switch {
		case block != nil && line == "```":
			if into != nil {
				*into = block.String()
			}
			followed = into != nil && into == &list[len(list)-1].commands
			block = nil
			continue
		case block != nil:
			block.WriteString(line + "\n")
		case line == "```sh":
			list = append(list, step{line: n + 1})
			block, into = &strings.Builder{}, &list[len(list)-1].commands
		case line == "```" && followed:
			block, into = &strings.Builder{}, &list[len(list)-1].says
		case strings.HasPrefix(line, "```"):
			block, into = &strings.Builder{}, nil
		}
		followed = false
	}
	return list
}

// shell is a shell into which the guide is typed.
type shell struct {
	in  io.Writer
	out *bufio.Reader
}

// mark ends the output of a step. No command of the guide prints it.
const mark = "--- end of step "

// run runs commands in the shell and returns their standard output. Each command has to succeed.
func (s *shell) run(t *testing.T, commands string) string {
	t.Helper()
	fmt.Fprintf(s.in, "set -e\n%sset +e\necho '%s'\n", commands, mark)
	var printed strings.Builder
	for {
		line, err := s.out.ReadString('\n')
		if err != nil {
			t.Fatalf("a command of\n%sfails, after\n%s", commands, &printed)
		}
		if line == mark+"\n" {
			return printed.String()
		}
		printed.WriteString(line)
	}
}

// TestGuide follows the guide, with the pauses of a reader, and compares the output with the guide.
func TestGuide(t *testing.T) {
	for _, program := range []string{"git", "make", "iperf3", "docker-compose"} {
		if _, err := exec.LookPath(program); err != nil {
			testkit.Skip(t, "no "+program)
		}
	}
	guide, err := os.ReadFile("../../docs/quickstart.md")
	must(t, err)
	list := steps(string(guide))
	if len(list) < 8 {
		t.Fatalf("the guide has %d blocks of commands", len(list))
	}
	h := newHost(t)
	sh := h.shell(t)
	for _, s := range list {
		h.await(t)
		printed := sh.run(t, s.commands)
		t.Logf("line %d:\n%s%s", s.line, s.commands, printed)
		if s.says != "" {
			s.compare(t, printed)
		}
	}
	if out := h.Must(t, "ps", "-aq"); out != "" {
		t.Errorf("containers are left: %s", out)
	}
}

// volatile matches what differs from run to run in the output of the guide's commands: numbers,
// with units that depend on the machine's speed, and names of veths.
var volatile = regexp.MustCompile(`veth[0-9a-f]+|[0-9]+(\.[0-9]+)?( ?([KMG]?(Bytes|bits/sec)|s|min|h)\b)?`)

func words(line string) string {
	return strings.Join(strings.Fields(volatile.ReplaceAllString(line, "N")), " ")
}

// rate matches the rate of an iperf3 receiver. A rate in Mbit/s shows a limit: without one, it is
// in Gbit/s.
var rate = regexp.MustCompile(`([0-9.]+) (M|G)bits/sec.*receiver`)

// mbits returns the rate in a line, in Mbit/s; 0 if there is none.
func mbits(t *testing.T, line string) float64 {
	m := rate.FindStringSubmatch(line)
	if m == nil {
		return 0
	}
	n, err := strconv.ParseFloat(m[1], 64)
	must(t, err)
	if m[2] == "G" {
		n *= 1000
	}
	return n
}

// compare fails the test if a line of the guide was not printed, numbers and spaces apart, or if a
// limit did not hold. The guide omits lines. A busy machine may well stay below a limit.
func (s step) compare(t *testing.T, printed string) {
	t.Helper()
	got := strings.Split(printed, "\n")
	for line := range strings.Lines(s.says) {
		i := slices.IndexFunc(got, func(l string) bool { return words(l) == words(line) })
		if i < 0 {
			t.Errorf("docs/quickstart.md:%d: these commands print\n%swhere the guide shows\n%s", s.line, printed, line)
			return
		}
		if shown, is := mbits(t, line), mbits(t, got[i]); shown < 1000 && is > 1.2*shown {
			t.Errorf("docs/quickstart.md:%d: %s, where the guide shows\n%s", s.line, got[i], line)
		}
		got = got[i+1:]
	}
}
