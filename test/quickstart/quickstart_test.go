// Package quickstart runs the commands of docs/quickstart.md, word by word, on
// a fresh copy of the repository beside a Docker Engine of the test's own. It
// is no test of what the agent does to the host; test/e2e is.
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

// patience is how long a busy machine may take for what takes milliseconds.
const patience = 90 * time.Second

// step is a block of commands of the guide, and what the guide says they print.
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

// shell is a shell in which a person types the guide.
type shell struct {
	in  io.Writer
	out *bufio.Reader
}

// mark ends the output of a step. Nothing in the guide prints it.
const mark = "--- end of step "

// run gives the shell some commands and returns what they print on their
// standard output. Each has to succeed.
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

// TestGuide does what the guide says, with the waits of somebody who reads in
// between, and compares what is printed with what the guide shows.
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

// volatile is what differs from run to run in what the guide's commands print:
// numbers, with units that depend on how fast the machine is, and names of veths.
var volatile = regexp.MustCompile(`veth[0-9a-f]+|[0-9]+(\.[0-9]+)?( ?([KMG]?(Bytes|bits/sec)|s|min|h)\b)?`)

func words(line string) string {
	return strings.Join(strings.Fields(volatile.ReplaceAllString(line, "N")), " ")
}

// rate is what iperf3 says that a receiver got. Mbit/s are the work of a limit:
// without one, it is Gbit/s.
var rate = regexp.MustCompile(`([0-9.]+) (M|G)bits/sec.*receiver`)

// mbits is the rate in a line, in Mbit/s; 0 if there is none.
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

// compare fails the test if a line that the guide shows was not printed, but for
// numbers and spaces, or if a limit did not hold. The guide leaves lines out. A
// busy machine may well stay below a limit.
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
