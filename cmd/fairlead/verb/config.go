package verb

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

const (
	defaultConfig   = "/etc/fairlead/fairlead.yaml"
	defaultState    = "/run/fairlead/state" // containers cannot fill it, and its content ends with the boot, as the changes do
	defaultRecord   = "/var/lib/fairlead/record"
	defaultPolicies = "/etc/fairlead/policy.d"
)

// setting is one "key: value" of the config file.
type setting struct {
	key, value string
	line       int
}

// readConfig reads a config file: one mapping from names of the agent's flags to scalars.
func readConfig(path string) ([]setting, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	return parseConfig(path, data)
}

func parseConfig(path string, data []byte) ([]setting, error) {
	file, err := parser.ParseBytes(data, 0)
	if err != nil {
		return nil, fmt.Errorf("config %s: %w", path, err)
	}
	var out []setting
	seen := map[string]int{}
	for _, doc := range file.Docs {
		var values []*ast.MappingValueNode
		switch body := doc.Body.(type) {
		case nil, *ast.NullNode, *ast.CommentGroupNode:
		case *ast.MappingNode:
			values = body.Values
		case *ast.MappingValueNode:
			values = []*ast.MappingValueNode{body}
		default:
			return nil, fmt.Errorf("config %s:%d: must be lines of the form \"key: value\"", path, body.GetToken().Position.Line)
		}
		for _, v := range values {
			s := setting{key: v.Key.String(), line: v.Key.GetToken().Position.Line}
			switch n := v.Value.(type) {
			case *ast.StringNode:
				s.value = n.Value
			case *ast.NullNode:
			case ast.ScalarNode:
				s.value = n.GetToken().Value
			default:
				return nil, fmt.Errorf("config %s:%d: %s: the value must be a word or a number", path, s.line, s.key)
			}
			if first := seen[s.key]; first != 0 {
				return nil, fmt.Errorf("config %s:%d: %s is already set in line %d", path, s.line, s.key, first)
			}
			seen[s.key] = s.line
			out = append(out, s)
		}
	}
	return out, nil
}

// Configure sets the flags of cmd from the config file, except those on the command line.
// The file may be missing unless --config names it.
func Configure(cmd *cobra.Command, path string, known *pflag.FlagSet) error {
	if path == "" {
		return nil
	}
	settings, err := readConfig(path)
	if errors.Is(err, fs.ErrNotExist) && !cmd.Flags().Changed("config") {
		return nil
	}
	if err != nil {
		return err
	}
	for _, s := range settings {
		if known.Lookup(s.key) == nil || s.key == "config" {
			return fmt.Errorf("config %s:%d: unknown key %q", path, s.line, s.key)
		}
		f := cmd.Flags().Lookup(s.key)
		if f == nil || f.Changed {
			continue // for another verb, or set on the command line
		}
		if err := f.Value.Set(s.value); err != nil {
			return fmt.Errorf("config %s:%d: %s: %q: %s", path, s.line, s.key, s.value, cli.Refusal(f, err))
		}
	}
	return nil
}
