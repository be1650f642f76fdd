package policy

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// TestDocs: the reference has a row for each key that says the truth about this
// build, and its examples are valid.
func TestDocs(t *testing.T) {
	data, err := os.ReadFile("../docs/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for _, k := range Schema() {
		if _, err := k.parseValue(k.Example); err != nil || k.Form == "" || k.Meaning == "" {
			t.Errorf("key %+v: its example: %v", k, err)
		}
		var want string
		switch {
		case strings.HasPrefix(k.Name, "net.ingress."):
			continue // one row for them all
		case k.Built == nil:
			want = " not available |"
		default:
			want = " `" + strings.Join(k.Built, "`, `") + "` |"
		}
		row := "\n| `" + k.Name + "` |"
		_, after, found := strings.Cut(text, row)
		line, _, _ := strings.Cut(after, "\n")
		if !found || !strings.HasSuffix(line, want) {
			t.Errorf("docs/policy.md: no row %q that ends in %q", row[1:], want)
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
	if examples != 4 {
		t.Errorf("docs/policy.md: %d examples of files, want 4", examples)
	}
}
