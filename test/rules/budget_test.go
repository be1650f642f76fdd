package rules

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/policy"
)

// The totals of the budget. They only fall: who adds to one room removes from another.
var totals = map[string]int{"product": 70417, "lab": 11116, "test": 75111, "c": 7911, "words": 35888, "exported": 1696, "keys": 24}

// A budget counts the content of each room of the house, the top two levels of folders: lines of Go
// in the product, in the laboratory and in tests with their kit, lines of C, words of Markdown,
// exported names of the product, and keys of policy. Generated files do not count.
type budget map[string]map[string]int

func (b budget) add(room, what string, n int) {
	if n == 0 {
		return
	}
	if b[room] == nil {
		b[room] = make(map[string]int)
	}
	b[room][what] += n
}

func (b budget) String() string {
	var out strings.Builder
	for _, room := range slices.Sorted(maps.Keys(b)) {
		out.WriteString(room)
		for _, what := range slices.Sorted(maps.Keys(b[room])) {
			fmt.Fprintf(&out, " %d %s", b[room][what], what)
		}
		out.WriteString("\n")
	}
	return out.String()
}

// parseBudget reads rows of "ROOM N WHAT N WHAT ...".
func parseBudget(text string) (budget, error) {
	b := make(budget)
	for n, line := range strings.Split(strings.TrimSpace(text), "\n") {
		words := strings.Fields(line)
		for i := 1; i < len(words); i += 2 {
			var count int
			if _, err := fmt.Sscan(words[i], &count); err != nil || i+1 == len(words) {
				return nil, fmt.Errorf("line %d: want ROOM N WHAT ...", n+1)
			}
			b.add(words[0], words[i+1], count)
		}
	}
	return b, nil
}

// over lists where real exceeds allowed, and where allowed is more than a twentieth above real.
func (b budget) over(real budget) (problems []string) {
	rooms := maps.Clone(b)
	maps.Copy(rooms, real)
	for _, room := range slices.Sorted(maps.Keys(rooms)) {
		kinds := maps.Clone(b[room])
		if kinds == nil {
			kinds = make(map[string]int)
		}
		maps.Copy(kinds, real[room])
		for _, what := range slices.Sorted(maps.Keys(kinds)) {
			allowed, is := b[room][what], real[room][what]
			if is > allowed {
				problems = append(problems, fmt.Sprintf("%s has %d %s, and may have %d", room, is, what, allowed))
			} else if allowed > is+max(is/20, 5) {
				problems = append(problems, fmt.Sprintf("%s has %d %s: lower its %d in budget.txt", room, is, what, allowed))
			}
		}
	}
	return problems
}

// counted counts the files that git lists below root.
func counted(root string) (budget, error) {
	list, err := exec.Command("git", "-C", root, "ls-files", "-co", "--exclude-standard", "*.go", "*.c", "*.h", "*.md").Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	b := make(budget)
	for name := range strings.Lines(string(list)) {
		name = strings.TrimSpace(name)
		data, err := os.ReadFile(filepath.Join(root, name))
		if os.IsNotExist(err) {
			continue // it is being deleted
		}
		if err != nil {
			return nil, err
		}
		if generated.Match(data) {
			continue
		}
		room := path.Dir(name)
		if parts := strings.Split(room, "/"); len(parts) > 2 {
			room = path.Join(parts[:2]...)
		}
		lines := bytes.Count(data, []byte("\n"))
		switch {
		case path.Ext(name) == ".md":
			b.add(room, "words", len(bytes.Fields(data)))
		case path.Ext(name) != ".go":
			b.add(room, "c", lines)
		case strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "test/") || strings.HasPrefix(name, "internal/testkit/") || strings.HasPrefix(name, "cmd/internal/verbtest/"):
			b.add(room, "test", lines)
		case strings.HasPrefix(name, "lab/") || strings.HasPrefix(name, "cmd/fairlead-lab/"):
			b.add(room, "lab", lines)
		default:
			b.add(room, "product", lines)
			n, err := exports(name, data)
			if err != nil {
				return nil, err
			}
			b.add(room, "exported", n)
		}
	}
	b.add("policy", "keys", len(policy.Schema()))
	return b, nil
}

// exports counts the exported names that a file declares, methods among them.
func exports(name string, data []byte) (n int, err error) {
	f, err := parser.ParseFile(token.NewFileSet(), name, data, 0)
	if err != nil {
		return 0, err
	}
	for _, id := range declared(f) {
		if ast.IsExported(id) {
			n++
		}
	}
	return n, nil
}

// TestBudget compares budget.txt with the tree. After a change that removes something, -update
// lowers the rows.
func TestBudget(t *testing.T) {
	real, err := counted("../..")
	must(t, err)
	if *update {
		must(t, os.WriteFile("budget.txt", []byte(real.String()), 0o644))
	}
	text, err := os.ReadFile("budget.txt")
	must(t, err)
	allowed, err := parseBudget(string(text))
	must(t, err)
	for _, problem := range allowed.over(real) {
		t.Error(problem)
	}
	sums := make(map[string]int)
	for _, row := range allowed {
		for what, n := range row {
			sums[what] += n
		}
	}
	for _, what := range slices.Sorted(maps.Keys(sums)) {
		if sums[what] > totals[what] {
			t.Errorf("the rows have %d %s together, and may have %d", sums[what], what, totals[what])
		}
	}
}
