package metrics

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
)

// Prefix begins the name of every series.
const Prefix = "fairlead_"

// maxLabel is the maximum length of a label's value, in bytes. Names of containers and pods
// stay below 253.
const maxLabel = 256

// labels are the labels of every series about a container, in this order. A series about
// the host has them with empty values, which Prometheus treats as absent. The sample's own
// labels follow: words of a feature, which are few, and other containers, each as two
// labels, its name and its id. A feature bounds the number of pairs of containers. No label
// holds a PID or a command.
func labels() []string { return []string{"container", "id", "pod", "namespace", "device"} }

// labelName reports whether a sample may have a label with this name. The ending marks
// labels that hold the id of another container.
func labelName(s string) bool {
	_, ok := name(s)
	return ok && !strings.HasPrefix(s, "__") && !strings.HasSuffix(s, "_id")
}

var validName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,127}$`)

// name returns the full name of a series, and whether it is valid.
func name(sample string) (string, bool) { return Prefix + sample, validName.MatchString(sample) }

// kind returns what the series with this name is.
func kind(name string) prometheus.ValueType {
	if strings.HasSuffix(name, "_total") {
		return prometheus.CounterValue
	}
	return prometheus.GaugeValue
}

// label turns a string that a container chose into a label's value: valid UTF-8 of bounded
// length. Bytes that are not UTF-8 become U+FFFD, and so do unprintable characters, which
// could control a reader's terminal. The id distinguishes containers whose names then look
// the same.
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

// help derives a help text from the name of a series whose feature gives none: "packets
// sent, counted up" for packets_sent_total.
func help(sample string) string {
	words := strings.ReplaceAll(strings.TrimSuffix(sample, "_total"), "_", " ")
	if kind(sample) == prometheus.CounterValue {
		return words + ", counted up"
	}
	return words
}
