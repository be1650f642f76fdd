package metrics

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

var update = flag.Bool("update", false, "write testdata/page.txt anew")

type fakeView struct {
	snaps   []feature.Snapshot
	running map[container.ID]container.Container
}

func (v *fakeView) Snapshots() []feature.Snapshot { return v.snaps }
func (v *fakeView) Container(id container.ID) (container.Container, bool) {
	c, ok := v.running[id]
	return c, ok
}
func (v *fakeView) Agent(send Send) (rounds uint64, took time.Duration) {
	send("agent_changes", "Changes, of a test.", 9)
	send("feature_calls_total", "Calls, of a test.", 3, "feature", "netcpu", "state", "\xff")
	return 4, 2 * time.Second
}
func (v *fakeView) Panicked(request string, value any) error {
	return fmt.Errorf("%s: panic: %v", request, value)
}

// torn is a View that panics.
type torn struct{ fakeView }

func (*torn) Agent(Send) (uint64, time.Duration) { panic("torn") }

// A panic while the page is made is the error of that page.
func TestPanic(t *testing.T) {
	r := prometheus.NewRegistry()
	r.MustRegister(agent{&torn{}})
	testkit.Fails(t, "the page's error", testkit.Err(r.Gather()), "GET /metrics: panic: torn")
}

// page gathers what v shows of fairlead's own series, as text.
func page(t *testing.T, v View) string {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(samples{v}, agent{v})
	families, err := r.Gather()
	must(t, err)
	var out strings.Builder
	for _, f := range families {
		testkit.Must(t, testkit.Err(expfmt.MetricFamilyToText(&out, f)))
	}
	return out.String()
}

func word(name, value string) feature.Label { return feature.Label{Name: name, Value: value} }

func other(name string, id container.ID) feature.Label {
	return feature.Label{Name: name, Container: id}
}

func work(id container.ID, direction, protocol string, v float64) feature.Sample {
	return feature.Sample{Container: id, Name: "netcpu_seconds_total", Labels: []feature.Label{word("direction", direction), word("protocol", protocol)}, Value: v}
}

func waits(id container.ID, n uint64) feature.Sample {
	return feature.Sample{Container: id, Name: "traffic_delay_seconds", Device: "eth0", Labels: []feature.Label{word("direction", "egress")}, Histogram: &hist.Forms{Classic: &hist.Classic{
		Buckets: []hist.Bound{{Le: 0.001, Count: 3}, {Le: 0.002, Count: 7}}, Count: n, Sum: 0.5,
	}}}
}

func theft(victim, culprit feature.Label, v float64) feature.Sample {
	return feature.Sample{Name: "netcpu_theft_seconds_total", Labels: []feature.Label{victim, culprit}, Value: v}
}

func example() *fakeView {
	return &fakeView{
		running: map[container.ID]container.Container{
			7: {ID: 7, Name: "web-1", Pod: "web", Namespace: "prod"},
			8: {ID: 8, Name: "evil\n\"\x1b[31m\xff"},
		},
		snaps: []feature.Snapshot{{Samples: []feature.Sample{
			{Container: 7, Name: "netcpu_kthread_seconds_total", Device: "eth0", Value: 1.5},
			{Container: 7, Name: "netcpu_kthread_seconds_total", Device: "eth1", Value: 2},
			{Container: 8, Name: "netcpu_kthread_seconds_total", Value: 3},
			{Container: 7, Name: "netcpu_weight", Value: 100},
			{Name: "netcpu_uplink_threads", Device: "eth0", Value: 2},
			{Container: 9, Name: "netcpu_weight", Value: 4}, // has ended
			{Container: 7, Name: "netcpu_weight", Value: 5}, // twice
			{Container: 7, Name: "Bad-Name", Value: 6},
			work(7, "receive", "udp", 0.25), work(7, "receive", "tcp", 0.5), work(7, "send", "udp", 0), work(0, "receive", "other", 1),
			work(7, "receive", "udp", 9), // twice
			waits(7, 9), waits(7, 8),     // twice
			waits(9, 9), // has ended
			theft(word("victim", "host"), other("culprit", 8), 4), theft(other("victim", 7), other("culprit", 8), 5),
			theft(other("victim", 7), word("culprit", "system"), 6),
			theft(other("victim", 9), other("culprit", 8), 7), theft(other("victim", 7), other("culprit", 9), 8), // 9 has ended
			theft(word("device", "x"), other("culprit", 8), 9), theft(word("a", "x"), word("a", "y"), 9), theft(word("__a", ""), word("b_id", ""), 9),
		}}},
	}
}

func TestPage(t *testing.T) {
	got := page(t, example())
	const golden = "testdata/page.txt"
	if *update {
		must(t, os.WriteFile(golden, []byte(got), 0o644))
	}
	want, err := os.ReadFile(golden)
	must(t, err)
	testkit.Same(t, "the page has changed; go test ./metrics -update writes it down", string(want), got)
}

// A scrape that asks for it gets a histogram in both forms, with the same durations.
func TestNativeHistogram(t *testing.T) {
	h := hist.New(3, 36)
	for _, ns := range []uint64{0, 1 << 20, 3 << 20, 3 << 20, 1 << 35} {
		h.Counts[hist.Bucket(ns, 3, len(h.Counts))]++
		h.Sum += ns
	}
	v := example()
	v.snaps = []feature.Snapshot{{Samples: []feature.Sample{{Container: 7, Name: "latency_seconds", Histogram: h.Forms(20, 22)}}}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	stop := testkit.Background(t, func(ctx context.Context) error { return Serve(ctx, l, v, "", slog.New(slog.DiscardHandler)) })
	defer func() { testkit.Check(t, stop()) }()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+l.Addr().String()+"/metrics", nil)
	must(t, err)
	req.Header.Set("Accept", "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited")
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	must(t, err)
	defer resp.Body.Close()
	dec := expfmt.NewDecoder(resp.Body, expfmt.ResponseFormat(resp.Header))
	for {
		var f dto.MetricFamily
		if err := dec.Decode(&f); err != nil {
			t.Fatalf("no histogram: %v", err)
		}
		if f.GetName() != "fairlead_latency_seconds" {
			continue
		}
		got := f.GetMetric()[0].GetHistogram()
		native, sum, each := got.GetZeroCount(), int64(0), int64(0)
		for _, delta := range got.GetPositiveDelta() {
			each += delta
			sum += each
		}
		if native += uint64(sum); native != 5 || got.GetSampleCount() != 5 || got.GetSchema() != 3 || len(got.GetPositiveSpan()) == 0 {
			t.Errorf("native: %d durations of 5: %v", native, got)
		}
		var classic []uint64
		for _, b := range got.GetBucket() {
			classic = append(classic, b.GetCumulativeCount())
		}
		if !slices.Equal(classic, []uint64{1, 2, 4}) {
			t.Errorf("classic: %v", classic)
		}
		return
	}
}

func TestName(t *testing.T) {
	for _, x := range []struct {
		sample string
		ok     bool
	}{
		{"netcpu_x_total", true}, {"a1", true}, {"_a", true},
		{"", false}, {"1a", false}, {"a-b", false}, {"A", false}, {"a b", false}, {"ä", false}, {"a\n", false}, {strings.Repeat("a", 200), false},
	} {
		got, ok := name(x.sample)
		if ok != x.ok || ok && (got != Prefix+x.sample || !model.LegacyValidation.IsValidMetricName(got)) {
			t.Errorf("name(%q) = %q, %v", x.sample, got, ok)
		}
	}
}

func FuzzLabel(f *testing.F) {
	testkit.Seeds(f, "", "web", "\xff\xfe", strings.Repeat("x", 300), strings.Repeat("x", 255)+"é", strings.Repeat("x", 254)+"😀", "\x00\x1b\"\\\n", strings.Repeat("\xff", 300))
	f.Fuzz(func(t *testing.T, s string) {
		got := label(s)
		if !utf8.ValidString(got) {
			t.Errorf("label(%q) = %q is not UTF-8", s, got)
		}
		if len(got) > maxLabel {
			t.Errorf("label of %d bytes has %d", len(s), len(got))
		}
		if strings.ContainsFunc(got, func(r rune) bool { return r != utf8.RuneError && !unicode.IsPrint(r) }) {
			t.Errorf("label(%q) = %q cannot be printed", s, got)
		}
		testkit.Same(t, "label is not stable for", got, label(got))
		if plain := !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }); plain && utf8.ValidString(s) && len(s) <= maxLabel && got != s {
			t.Errorf("label(%q) = %q", s, got)
		}
	})
}

func TestListenRefuses(t *testing.T) {
	for addr, want := range map[string]string{
		":9643":             "0.0.0.0:9643 if that is what you want",
		"nonsense":          "missing port",
		"127.0.0.1:1234567": "invalid port",
	} {
		l, err := Listen(addr)
		if err == nil {
			l.Close()
		}
		testkit.Fails(t, fmt.Sprintf("Listen(%q)", addr), err, want)
	}
	l, err := Listen("0.0.0.0:0")
	must(t, err)
	defer l.Close()
	if Loopback(l) {
		t.Error("0.0.0.0 is taken for loopback")
	}
}

var must = testkit.Must
