package law_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// most is how many constants the law may have.
const most = 20

// beside are the constants of the packages that carry the law out, and why they are no part of it.
var beside = map[string]string{
	"isolate.ring":         "size of a buffer",
	"isolate.deferMost":    "what a knob is set to",
	"isolate.pollSlice":    "what a knob is set to: the kernel's shortest",
	"isolate.usualShares":  "unit",
	"isolate.uplinkShares": "what a knob is set to, without early drop",
	"isolate.keptWait":     "how long the agent waits for the kernel",
	"isolate.namedWait":    "how long the agent waits for the kernel",
	"isolate.second":       "unit",
	"charge.lookEvery":     "precision of a write: what the agent spends",
	"charge.grain":         "precision of the runtime's timers",
	"ledger.minQuota":      "the kernel's",
	"ledger.Unlimited":     "name",
	"auto.victimsMost":     "length of a text",
}

// Whatever decides who pays, when and how much is in package law, or follows from that.
func TestConstants(t *testing.T) {
	law := byHand(t, ".")
	if len(law) == 0 || len(law) > most {
		t.Errorf("the law has %d constants, may have %d", len(law), most)
	}
	left := maps.Clone(beside)
	for _, dir := range []string{"isolate", "auto", "charge", "ledger"} {
		for name, lit := range byHand(t, filepath.Join("..", dir)) {
			if left[name] == "" {
				t.Errorf("%s of %s is neither in package law, nor derived from it, nor said not to be of it", lit, name)
			}
			delete(left, name)
		}
	}
	for name := range left {
		t.Errorf("there is no %s", name)
	}
}

// number matches what is, or contains, a number of its own, and follows from no constant of the law.
var number = regexp.MustCompile(`^(-?\d[^a-z]*|.*\btime\.[A-Z]\w+)$`)

// byHand returns the constants of a package with a number of their own, and each fraction elsewhere.
func byHand(t *testing.T, dir string) map[string]string {
	found := make(map[string]string)
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	testkit.Must(t, err)
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		testkit.Must(t, err)
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.ValueSpec:
				for i, value := range n.Values {
					if text := types.ExprString(value); number.MatchString(text) || f.Name.Name == "law" {
						found[f.Name.Name+"."+n.Names[i].Name] = text
					}
				}
				return false
			case *ast.BasicLit:
				if n.Kind == token.FLOAT && n.Value != "1.0" {
					found[f.Name.Name+" at "+filepath.Base(path)] = n.Value
				}
			}
			return true
		})
	}
	return found
}
