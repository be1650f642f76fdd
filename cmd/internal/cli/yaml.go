package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
)

// writeYAML writes a JSON document as YAML, with the fields in the same order. Strings that
// are not plain words stay JSON strings, which are valid YAML. So neither a parser nor a
// terminal can misinterpret them. (goccy/go-yaml 1.19 writes control characters as they
// are, and 1e300 so that it reads back as a string.)
func writeYAML(w io.Writer, data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var out strings.Builder
	if err := yamlValue(&out, dec, 0, true); err != nil {
		return err
	}
	_, err := io.WriteString(w, strings.TrimLeft(out.String(), "\n "))
	return err
}

// yamlValue writes the next value of dec at a depth. An object or a list begins on a line of
// its own, except within a list.
func yamlValue(out *strings.Builder, dec *json.Decoder, depth int, fresh bool) error {
	tok, err := dec.Token()
	if err != nil {
		return err
	}
	switch t := tok.(type) {
	case json.Delim:
		if !dec.More() {
			_, err := dec.Token()
			out.WriteString(map[json.Delim]string{'{': " {}\n", '[': " []\n"}[t])
			return err
		}
		if !fresh {
			out.WriteString("\n")
		}
		for n := 0; dec.More(); n++ {
			if n > 0 || !fresh || t == '[' {
				out.WriteString(strings.Repeat("  ", depth))
			}
			if t == '[' {
				out.WriteString("-")
				if err := yamlItem(out, dec, depth+1); err != nil {
					return err
				}
				continue
			}
			key, err := dec.Token()
			if err != nil {
				return err
			}
			out.WriteString(yamlString(key.(string)) + ":")
			if err := yamlValue(out, dec, depth+1, false); err != nil {
				return err
			}
		}
		_, err := dec.Token()
		return err
	case string:
		fmt.Fprintf(out, " %s\n", yamlString(t))
	case json.Number:
		fmt.Fprintf(out, " %s\n", yamlNumber(string(t)))
	case nil:
		out.WriteString(" null\n")
	default:
		fmt.Fprintf(out, " %v\n", t)
	}
	return nil
}

// yamlItem writes an element of a list after its dash. The first field of an object is on
// the line of the dash.
func yamlItem(out *strings.Builder, dec *json.Decoder, depth int) error {
	var item strings.Builder
	if err := yamlValue(&item, dec, depth, true); err != nil {
		return err
	}
	out.WriteString(" " + strings.TrimLeft(item.String(), " "))
	return nil
}

// yamlNumber formats a JSON number so that every YAML parser reads it as a number. Some
// accept an exponent only after a fraction.
func yamlNumber(s string) string {
	if i := strings.IndexAny(s, "eE"); i >= 0 && !strings.Contains(s, ".") {
		return s[:i] + ".0" + s[i:]
	}
	return s
}

var plainWord = regexp.MustCompile(`^[A-Za-z_/][A-Za-z0-9_./@-]*$`)

func yamlString(s string) string {
	switch strings.ToLower(s) {
	case "true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf":
	default:
		if plainWord.MatchString(s) {
			return s
		}
	}
	data, _ := json.Marshal(s) // never fails for a string
	return string(data)
}
