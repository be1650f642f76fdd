package law_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path/filepath"
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

// byHand returns what each constant of a package is that is not derived from the law, and each fraction
// outside of constants.
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
			case *ast.GenDecl:
				for _, s := range n.Specs {
					if v, is := s.(*ast.ValueSpec); is && n.Tok == token.CONST {
						for i, value := range v.Values {
							if text := types.ExprString(value); strings.ContainsAny(text, "0123456789") && text[0] != '"' && !strings.Contains(text, "law.") || strings.HasPrefix(text, "time.") {
								found[f.Name.Name+"."+v.Names[i].Name] = text
							}
						}
					}
				}
				return n.Tok != token.CONST
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
