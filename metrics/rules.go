package metrics

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Prefix begins the name of every series.
const Prefix = "fairlead_"

// maxLabel bounds the value of a label, in bytes. Names of containers and pods
// stay below 253.
const maxLabel = 256

// labels are those of every series about a container, in this order. A series
// about the host has them too, empty, which is the same as not having them.
// After them come those that the sample brings: words of a feature, which are
// few, and other containers, each as two labels, its name and its id. Of pairs
// of containers a feature gives a bounded number. There is never a PID or a
// command among them.
func labels() []string { return []string{"container", "id", "pod", "namespace", "device"} }

// labelName says whether a sample may have a label with this name. The ending
// is for the labels that hold the id of another container.
func labelName(s string) bool {
	_, ok := name(s)
	return ok && !strings.HasPrefix(s, "__") && !strings.HasSuffix(s, "_id")
}

// name makes the full name of a series from that of a Sample, and says whether
// it is one: lower-case letters, digits and underscores, not beginning with a
// digit.
func name(sample string) (string, bool) {
	if sample == "" || len(sample) > 128 || sample[0] >= '0' && sample[0] <= '9' {
		return "", false
	}
	for _, r := range sample {
		if r != '_' && (r < 'a' || r > 'z') && (r < '0' || r > '9') {
			return "", false
		}
	}
	return Prefix + sample, true
}

// counts says whether a series with this name counts up.
func counts(name string) bool { return strings.HasSuffix(name, "_total") }

// label makes the value of a label of a string that a container chose: valid
// UTF-8 of bounded length. What cannot be printed, and could drive the terminal
// of whoever looks at the page, becomes U+FFFD like what is not UTF-8; the id
// keeps apart what then looks the same.
func label(s string) string {
	var b strings.Builder
	for _, r := range s { // a byte that is not UTF-8 is a U+FFFD here
		if !unicode.IsPrint(r) {
			r = utf8.RuneError
		}
		if b.Len()+utf8.RuneLen(r) > maxLabel {
			break
		}
		b.WriteRune(r)
	}
	return b.String()
}

// help makes a help text from the name of a series whose feature has none:
// "packets sent, counted up" for packets_sent_total.
func help(sample string) string {
	words := strings.ReplaceAll(strings.TrimSuffix(sample, "_total"), "_", " ")
	if counts(sample) {
		return words + ", counted up"
	}
	return words
}
