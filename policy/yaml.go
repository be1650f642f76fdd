package policy

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// maxDepth limits brackets, and dashes on a line, because the parser recurses. The schema needs 4.
const maxDepth = 16

// maxTokens limits the tokens of a file, because the parser's time grows with their square. A thousand
// short policies fit.
const maxTokens = 20000

// parse returns the bodies of the documents in data. It reports invalid YAML, and parts of YAML that
// policy files may not use.
func (r *reader) parse(data []byte) (docs []ast.Node) {
	// The lexer miscounts lines that end in CR LF.
	data = bytes.ReplaceAll(data, []byte("\r\n"), []byte("\n"))
	if at, what := unfit(data); what != "" {
		r.problem(at, "", "", "%s", what)
		return nil
	}
	// The parser is not ours, and the file is untrusted.
	defer func() {
		if p := recover(); p != nil {
			r.problem(place{line: 1, column: 1}, "", "", "is not YAML: %s", printable(fmt.Sprint(p)))
			docs = nil
		}
	}()
	tokens := lexer.Tokenize(string(data))
	if r.unwanted(tokens); len(r.problems) > 0 {
		return nil
	}
	f, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey()) // we look for duplicates ourselves
	if err != nil {
		at, text := place{line: 1, column: 1}, ""
		var ye yaml.Error
		if errors.As(err, &ye) {
			text = ye.GetMessage() // Error() would draw the whole file around it
			at = placeOf(ye.GetToken())
		}
		if text == "" {
			text = err.Error()
		}
		r.problem(at, "", "", "is not YAML: %s", printable(text))
		return nil
	}
	for _, d := range f.Docs {
		if d.Body != nil && d.Body.Type() != ast.NullType && d.Body.Type() != ast.CommentType {
			docs = append(docs, d.Body)
		}
	}
	return docs
}

// unfit returns why data cannot be policy, and where.
func unfit(data []byte) (place, string) {
	if len(data) > MaxFileSize {
		return place{line: 1, column: 1}, errTooLarge.Error()
	}
	line, column := 1, 1
	for rest := data; len(rest) > 0; {
		c, n := utf8.DecodeRune(rest)
		switch {
		case c == utf8.RuneError && n == 1:
			return place{line: line, column: column}, "is not UTF-8"
		case c < ' ' && !bytes.ContainsRune([]byte("\t\n"), c), c >= 0x7f && c < 0xa0:
			return place{line: line, column: column}, fmt.Sprintf("control character %U", c)
		case c == '\n':
			line, column = line+1, 0
		}
		column++
		rest = rest[n:]
	}
	return place{}, ""
}

// unwanted reports parts of YAML that could give a file a meaning other than the apparent one, or
// exhaust the parser.
func (r *reader) unwanted(tokens token.Tokens) {
	depth, dashes, line := 0, 0, 0
	for i, tk := range tokens {
		at := placeOf(tk)
		if i == maxTokens {
			r.problem(at, "", "", "is too much for one file; split it")
			return
		}
		what := ""
		switch tk.Type {
		case token.AnchorType, token.AliasType, token.MergeKeyType:
			what = "anchors, aliases and merge keys"
		case token.TagType:
			what = "tags"
		case token.DirectiveType:
			what = "directives"
		case token.MappingKeyType:
			what = `keys with "?"`
		case token.SequenceStartType, token.MappingStartType:
			depth++
		case token.SequenceEndType, token.MappingEndType:
			depth--
		case token.SequenceEntryType:
			if at.line != line {
				dashes, line = 0, at.line
			}
			dashes++
		}
		if what != "" {
			r.problem(at, "", "", "YAML %s are not supported in policy files", what)
		}
		if depth > maxDepth || dashes > maxDepth {
			r.problem(at, "", "", "is nested too deeply")
			return
		}
	}
}

// printable returns s in one line that is safe to print.
func printable(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	if len(s) > 200 {
		s = s[:200] + "..."
	}
	q := strconv.Quote(s)
	return strings.ReplaceAll(q[1:len(q)-1], `\"`, `"`)
}
