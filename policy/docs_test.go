package policy

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestDocs: the reference has a row for each key, with its default, and its examples
// are valid.
func TestDocs(t *testing.T) {
	data, err := os.ReadFile("../docs/policy.md")
	testkit.Must(t, err)
	text := string(data)
	for _, k := range Schema() {
		if _, err := k.parseValue(k.Example); err != nil || k.Form == "" || k.Meaning == "" {
			t.Errorf("key %+v: its example: %v", k, err)
		}
		if strings.HasPrefix(k.Name, "net.ingress.") {
			continue // one row for them all
		}
		row := "\n| `" + k.Name + "` |"
		_, after, found := strings.Cut(text, row)
		line, _, _ := strings.Cut(after, "\n")
		cells := strings.Split(line, " | ")
		if !found || len(cells) != 3 || k.Default != "" && strings.Trim(cells[1], "`") != k.Default {
			t.Errorf("docs/policy.md: no row %q with the default %q", row[1:], k.Default)
		}
		if (k.Host != "") != strings.Contains(line, "`labels: host`") {
			t.Errorf("docs/policy.md: %s: labels count where a file says so (%q); its row is %s", k.Name, k.Host, line)
		}
	}
	examples := 0
	for part := range strings.SplitSeq(text, "```yaml\n") {
		example, _, closed := strings.Cut(part, "\n```")
		if !closed || !slices.ContainsFunc([]string{"match:", "policies:"}, func(s string) bool { return strings.Contains(example, s) }) {
			continue
		}
		examples++
		for _, p := range Check("example", []byte(example+"\n")) {
			t.Errorf("docs/policy.md: %v in\n%s", p, example)
		}
	}
	testkit.Same(t, "examples of files in docs/policy.md", 5, examples)
}
