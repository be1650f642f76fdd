package rules

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestSecurity checks that each claim of SECURITY.md names its tests, and that these exist.
func TestSecurity(t *testing.T) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	must(t, err)
	root := strings.TrimSpace(string(out))
	text, err := os.ReadFile(filepath.Join(root, "SECURITY.md"))
	must(t, err)
	there := make(map[string]bool)
	function := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	for _, p := range packages(t) {
		for _, name := range append(p.TestGoFiles, p.XTestGoFiles...) {
			data, err := os.ReadFile(filepath.Join(p.Dir, name))
			must(t, err)
			for _, m := range function.FindAllSubmatch(data, -1) {
				there[string(m[1])] = true
			}
		}
	}
	named := regexp.MustCompile("`((?:Test|Fuzz)\\w+)`").FindAllStringSubmatch(string(text), -1)
	if len(named) < 40 {
		t.Errorf("SECURITY.md names %d tests: was its form changed?", len(named))
	}
	for _, m := range named {
		if !there[m[1]] {
			t.Errorf("SECURITY.md names %s, and there is no such test", m[1])
		}
	}
}
