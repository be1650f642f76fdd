// Package metrics shows what the agent and its features measure as a
// Prometheus page.
//
// Each scrape reads everything from one View. No registry of series has to be kept in step,
// and the series of a container end with it.
// The package knows no feature by name. Package agent runs it.
package metrics

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/hist"
)

// View is the agent that the page describes. Several goroutines call its methods.
type View interface {
	// Snapshots reads the features' counters.
	Snapshots() []feature.Snapshot
	// Container returns a running container. The page leaves out series of all others.
	Container(container.ID) (container.Container, bool)
	// Agent sends what the agent measures of itself. It returns the number of rounds, and the time of all
	// of them together.
	Agent(send Send) (rounds uint64, took time.Duration)
	// Panicked takes the value of a panic while the page was made, and returns its error. It does
	// not return if the agent cannot go on.
	Panicked(request string, value any) error
}

// Send takes a series of the agent's own: its name, what it is, its value, and names and values of its
// labels in turn.
type Send func(name, help string, value float64, labels ...string)

// New returns a registry of everything in v, of the Go runtime and of the process.
func New(v View) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(
		samples{v},
		agent{v},
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return r
}

// samples collects the measurements of the features. It describes no series in advance,
// because the features decide at each scrape which there are.
type samples struct{ view View }

func (samples) Describe(chan<- *prometheus.Desc) {}

func (s samples) Collect(out chan<- prometheus.Metric) {
	defer contain(s.view, out)
	descs := make(map[string]*prometheus.Desc)
	seen := make(map[string]bool)
	refused := 0
	for _, snap := range s.view.Snapshots() {
		for _, x := range snap.Samples {
			full, ok := name(x.Name)
			names, values, found := s.labels(x)
			if !found {
				continue // of a container that has ended
			}
			family := full + "\xff" + strings.Join(names, "\xff")
			series := family + "\xff" + strings.Join(values, "\xff")
			if !ok || len(names) != len(values) || seen[series] {
				refused++ // a second one with the same labels would spoil the page
				continue
			}
			seen[series] = true
			desc := descs[family]
			if desc == nil {
				desc = prometheus.NewDesc(full, cmp.Or(snap.Help[x.Name], help(x.Name)), names, nil)
				descs[family] = desc
			}
			m, err := constant(desc, x, values)
			if err != nil {
				refused++
				continue
			}
			out <- m
		}
	}
	out <- prometheus.MustNewConstMetric(prometheus.NewDesc(Prefix+"metrics_refused",
		"Samples of this scrape that were left out because of an invalid or repeated name.", nil, nil), prometheus.GaugeValue, float64(refused))
}

// contain is deferred: it makes a panic the error of the page.
func contain(v View, out chan<- prometheus.Metric) {
	if value := recover(); value != nil {
		out <- prometheus.NewInvalidMetric(prometheus.NewDesc(Prefix+"panic", "A panic.", nil, nil), v.Panicked("GET /metrics", value))
	}
}

// constant converts a sample to a Prometheus metric.
func constant(desc *prometheus.Desc, x feature.Sample, values []string) (prometheus.Metric, error) {
	if x.Histogram != nil {
		return newHistogram(desc, x.Histogram, values)
	}
	return prometheus.NewConstMetric(desc, kind(x.Name), x.Value, values...)
}

// labels returns the names and values of a sample's labels. There are fewer values than
// names if one is not valid. found is false if the sample's container, or one that a label
// names, no longer runs.
func (s samples) labels(x feature.Sample) (names, values []string, found bool) {
	var c container.Container
	id := ""
	if x.Container != 0 {
		if c, found = s.view.Container(x.Container); !found {
			return nil, nil, false
		}
		id = c.ID.String()
	}
	names = labels()
	values = []string{label(c.Name), id, label(c.Pod), label(c.Namespace), label(x.Device)}
	for _, l := range x.Labels {
		if !labelName(l.Name) || slices.Contains(names, l.Name) {
			return names, nil, true
		}
		if l.Container == 0 {
			names, values = append(names, l.Name), append(values, label(l.Value))
			continue
		}
		other, found := s.view.Container(l.Container)
		if !found {
			return nil, nil, false
		}
		names = append(names, l.Name, l.Name+"_id")
		values = append(values, label(other.Name), other.ID.String())
	}
	return names, values, true
}

// agent collects the agent's measurements of itself.
type agent struct{ view View }

func (agent) Describe(chan<- *prometheus.Desc) {}

func (a agent) Collect(out chan<- prometheus.Metric) {
	defer contain(a.view, out)
	rounds, took := a.view.Agent(func(name, help string, value float64, pairs ...string) {
		var names, values []string
		for i := 0; i+1 < len(pairs); i += 2 {
			names, values = append(names, pairs[i]), append(values, label(pairs[i+1]))
		}
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc(Prefix+name, help, names, nil), kind(name), value, values...)
	})
	out <- prometheus.MustNewConstSummary(prometheus.NewDesc(Prefix+"agent_round_seconds",
		"Duration of the reconcile loop's rounds, without the calls to features.", nil, nil), rounds, took.Seconds(), nil)
}

// both is one metric with the classic and the native form of a histogram. The text page has
// the classic form, and a scrape by protobuf has both.
type both struct {
	prometheus.Metric // the classic form
	native            prometheus.Metric
}

func newHistogram(desc *prometheus.Desc, of *hist.Forms, values []string) (prometheus.Metric, error) {
	buckets := make(map[float64]uint64, len(of.Classic.Buckets))
	for _, b := range of.Classic.Buckets {
		buckets[b.Le] = b.Count
	}
	classic, err := prometheus.NewConstHistogram(desc, of.Classic.Count, of.Classic.Sum, buckets, values...)
	if err != nil || of.Native == nil {
		return classic, err
	}
	n := of.Native
	native, err := prometheus.NewConstNativeHistogram(desc, n.Count, n.Sum, n.Positive, nil, n.Zero, n.Schema,
		prometheus.DefNativeHistogramZeroThreshold, time.Time{}, values...)
	return both{classic, native}, err
}

// Write implements prometheus.Metric.
func (b both) Write(out *dto.Metric) error {
	if err := b.Metric.Write(out); err != nil {
		return err
	}
	var native dto.Metric
	if err := b.native.Write(&native); err != nil {
		return err
	}
	h, n := out.Histogram, native.Histogram
	h.Schema, h.ZeroThreshold, h.ZeroCount = n.Schema, n.ZeroThreshold, n.ZeroCount
	h.PositiveSpan, h.PositiveDelta = n.PositiveSpan, n.PositiveDelta
	return nil
}

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
