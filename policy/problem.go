package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/container"
)

// Problem is one error in policy, and its place: a File (with Line and Column, both from 1, if known)
// or a Container. It implements error.
type Problem struct {
	File         string
	Line, Column int

	Container container.ID
	Name      string // the container's name

	// Key is the key as its author writes it: "net.rate" or "match.name" in a file,
	// "fairlead.net.rate" in a label. "" if no key is to blame.
	Key    string
	Value  string // as written, in full; "" if the value is not to blame
	Reason string // for a person, in one line
}

// String returns "file:line:col: key: reason" or, for a container, `container "web-1" (4711): key:
// reason`. The value comes quoted and shortened before the reason. Text from a container or a file
// is quoted unless it is plain, so that the line is safe on a terminal.
func (p Problem) String() string {
	var b strings.Builder
	switch {
	case p.File != "":
		b.WriteString(plain(p.File))
		if p.Line > 0 {
			fmt.Fprintf(&b, ":%d:%d", p.Line, p.Column)
		}
		b.WriteString(": ")
	case p.Container != 0 || p.Name != "":
		fmt.Fprintf(&b, "container %s (%s): ", quote(p.Name), p.Container)
	}
	if p.Key != "" {
		b.WriteString(plain(p.Key) + ": ")
	}
	if p.Value != "" {
		b.WriteString(quote(p.Value) + ": ")
	}
	b.WriteString(p.Reason)
	return b.String()
}

// Error is String.
func (p Problem) Error() string { return p.String() }

// Problems is an error of at least one Problem.
type Problems []Problem

// Error returns one problem per line.
func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

func sortByPlace(ps []Problem) {
	slices.SortStableFunc(ps, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
}

// maxQuoted limits the bytes of untrusted text that we print.
const maxQuoted = 64

// quote returns s as a Go string literal, shortened.
func quote(s string) string {
	if len(s) <= maxQuoted {
		return strconv.Quote(s)
	}
	return strconv.Quote(s[:maxQuoted]) + "... (" + strconv.Itoa(len(s)) + " bytes)"
}

// plain returns s itself if it is only a name or a path, else quote(s). Paths may be long; they
// come from the administrator.
func plain(s string) string {
	for _, r := range s {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', strings.ContainsRune("._-/@+,~ ", r):
		default:
			return quote(s)
		}
	}
	if s == "" || (len(s) > maxQuoted && !strings.Contains(s, "/")) || len(s) > 4096 {
		return quote(s)
	}
	return s
}

// nearest returns the candidate that s most likely misspells, or "".
func nearest(s string, candidates []string) string {
	if len(s) > maxQuoted {
		return ""
	}
	best, distance := "", 3
	for _, c := range candidates {
		if d := editDistance(s, c); d < distance && d < len(c) {
			best, distance = c, d
		}
	}
	return best
}

// editDistance is Levenshtein's, by bytes, with one row of the matrix.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			substituted := diagonal
			if a[i] != b[j] {
				substituted++
			}
			diagonal = row[j+1]
			row[j+1] = min(substituted, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}

// unknownKey is the reason for a key that is not in candidates. It suggests what was meant: another
// case, the missing group, without a superfluous part, or else the nearest spelling.
func unknownKey(s string, candidates []string) string {
	found := meantKeys(s, candidates)
	if n := nearest(s, candidates); len(found) == 0 && n != "" {
		found = []string{n}
	}
	if len(found) == 0 {
		return "unknown key"
	}
	return "unknown key; did you mean " + strings.Join(found, " or ") + "?"
}

func meantKeys(s string, candidates []string) []string {
	if len(s) > maxQuoted {
		return nil
	}
	s = strings.ToLower(s)
	if slices.Contains(candidates, s) {
		return []string{s}
	}
	for i, c := range parts(s) {
		rest := slices.Delete(parts(s), i, i+1)
		if k := strings.Join(rest, "."); c != "" && slices.Contains(candidates, k) {
			return []string{k}
		}
	}
	// "ceil" is net.ceil rather than net.ingress.ceil, and "weight" is either of two.
	labels, s := strings.HasPrefix(s, prefix), strings.TrimPrefix(s, prefix)
	var found []string
	for _, c := range candidates {
		key := strings.TrimPrefix(c, prefix)
		if labels != (key != c) || !strings.HasSuffix(key, "."+s) {
			continue
		}
		if len(found) > 0 && len(parts(found[0])) != len(parts(c)) {
			if len(parts(found[0])) < len(parts(c)) {
				continue
			}
			found = nil
		}
		found = append(found, c)
	}
	return found
}

func parts(key string) []string { return strings.Split(key, ".") }
