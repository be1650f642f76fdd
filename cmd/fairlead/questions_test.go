package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
)

var update = flag.Bool("update", false, "write what the commands of docs/questions print into the pages")

var (
	// question is a block of a page with a command and what it prints.
	question = regexp.MustCompile("(?ms)^```\n\\$ (fairlead [^\n]*)\n(.*?)^```$")
	// named is a file that the page shows.
	named = regexp.MustCompile("(?ms)^```yaml\n# ([\\w-]+\\.yaml)\n(.*?)^```$")
)

// TestQuestions runs the commands of the pages against the agent of an invented host, and compares
// what they print with what the pages show. -update writes it there.
func TestQuestions(t *testing.T) {
	folder, err := filepath.Abs("../../docs/questions")
	must(t, err)
	host, err := os.ReadFile("testdata/host.json")
	must(t, err)
	pages, err := filepath.Glob(folder + "/*.md")
	if err != nil || len(pages) < 6 {
		t.Fatalf("pages %q, %v", pages, err)
	}
	for _, name := range pages {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".md"), func(t *testing.T) {
			page, err := os.ReadFile(name)
			must(t, err)
			t.Chdir(t.TempDir())
			for _, m := range named.FindAllSubmatch(page, -1) {
				must(t, os.WriteFile(string(m[1]), m[2], 0o644))
			}
			if !question.Match(page) {
				t.Error("no command")
			}
			is := question.ReplaceAllFunc(page, func(block []byte) []byte {
				m := question.FindSubmatch(block)
				return fmt.Appendf(nil, "```\n$ %s\n%s```", m[1], answer(t, host, string(m[1])))
			})
			if *update {
				err = os.WriteFile(name, is, 0o644)
			} else if !bytes.Equal(is, page) {
				verbtest.Compare(t, string(page), string(is))
			}
			must(t, err)
		})
	}
}

// answer is what a command prints.
func answer(t *testing.T, host []byte, command string) string {
	t.Helper()
	args := strings.Fields(command)[1:]
	var errs bytes.Buffer
	e := cli.Env{Stdin: strings.NewReader(""), Stderr: &errs, Getenv: func(string) string { return "" }}
	verb, _, err := program(verbs()).Root(e).Find(args)
	must(t, err)
	if verb.Flags().Lookup("interval") != nil {
		args = append(args, "--interval", "100ms")
	}
	if verb.Flags().Lookup("socket") != nil {
		status, out, errs := verbtest.Against(t, run, verbtest.ReadStub(t, host), args...)
		if status != cli.Done {
			t.Fatalf("%s: status %d: %s", command, status, errs)
		}
		return out
	}
	var out bytes.Buffer
	e.Stdout, e.Args = &out, args
	if status := run(t.Context(), e); status != cli.Done {
		t.Fatalf("%s: status %d: %s", command, status, &errs)
	}
	return out.String()
}
