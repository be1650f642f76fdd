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
	"isolate.ring":                "size of a buffer",
	"isolate.deferMost":           "what a knob is set to",
	"isolate.pollSlice":           "what a knob is set to: the kernel's shortest",
	"isolate.usualShares":         "unit",
	"isolate.uplinkShares":        "what a knob is set to, without early drop",
	"isolate.keptWait":            "how long the agent waits for the kernel",
	"isolate.namedWait":           "how long the agent waits for the kernel",
	"isolate.second":              "unit",
	"charge.lookEvery":            "precision of a write: what the agent spends",
	"charge.grain":                "precision of the runtime's timers",
	"account.memory":              "precision of a measurement",
	"account.anew":                "precision of a measurement",
	"account.oneIn":               "precision of a measurement: what the agent spends",
	"account.changedTime":         "precision of a measurement: what the kernel's ticks show",
	"account.mostChanges":         "what the agent spends",
	"account.laterOf":             "what the agent spends",
	"account.laterFrom":           "what the agent spends",
	"account.aroundEvery":         "precision of a measurement: what the agent spends",
	"account.aroundCount":         "precision of a measurement",
	"account.aroundNone":          "precision of a measurement",
	"account.aroundSet":           "how long the agent waits for the kernel",
	"account.aroundWait":          "how long the agent waits for the kernel",
	"account.aroundMost":          "precision of a measurement",
	"account.notable":             "precision of a measurement",
	"account.settling":            "how long the agent waits for the kernel",
	"account.idleMost":            "size of a table",
	"account.runOnCPU":            "the kernel's",
	"account.membarrierExpedited": "the kernel's",
	"account.membarrierRegister":  "the kernel's",
	"account.exits":               "place in a list",
	"account.enters":              "place in a list",
	"ledger.minQuota":             "the kernel's",
	"ledger.Unlimited":            "name",
	"auto.victimsMost":            "length of a text",
}

// Every constant that decides who pays, when and how much is in package law, or derived from it.
func TestConstants(t *testing.T) {
	law := byHand(t, ".")
	if len(law) == 0 || len(law) > most {
		t.Errorf("the law has %d constants, may have %d", len(law), most)
	}
	left := maps.Clone(beside)
	for _, dir := range []string{"account", "isolate", "auto", "charge", "ledger"} {
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

// number matches an expression that contains a number and no constant of the law.
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
