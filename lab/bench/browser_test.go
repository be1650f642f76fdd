package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"image/color"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/report"
)

// seen is what a browser has rendered.
type seen struct {
	Plots, Bars int
	Requests    []string // of the network
	Covered     []string // texts of a plot that overlap another, or lie outside of it
	Flat        []string // bars without an extent
	Wide        float64  // of the page, beyond the window
}

// look runs in the browser at the end of the page, and writes its findings into the document.
const look = `<pre id="seen"></pre><script>
const seen = {Plots: 0, Bars: 0, Covered: [], Flat: [],
	Requests: performance.getEntriesByType("resource").map(e => e.name),
	Wide: document.documentElement.scrollWidth - window.innerWidth};
for (const svg of document.querySelectorAll("figure svg")) {
	const all = svg.getBoundingClientRect(), title = svg.getAttribute("aria-label");
	seen.Plots++;
	const texts = [...svg.querySelectorAll("text")].map(t => ({t: t.textContent, r: t.getBoundingClientRect()}));
	texts.forEach((a, i) => {
		if (a.r.left < all.left-1 || a.r.right > all.right+1 || a.r.top < all.top-1 || a.r.bottom > all.bottom+1)
			seen.Covered.push(title + ": " + a.t + " is cut off");
		for (const b of texts.slice(i+1))
			// The boxes of two lines touch; their letters do not.
			if (a.r.left < b.r.right-1 && b.r.left < a.r.right-1 && a.r.top < b.r.bottom-4 && b.r.top < a.r.bottom-4)
				seen.Covered.push(title + ": " + a.t + " on " + b.t);
	});
	for (const bar of svg.querySelectorAll("path.fill:not(.part, .rest, .ink-none)")) {
		const r = bar.getBoundingClientRect();
		seen.Bars++;
		if (r.width < 2 || r.height < 0.5) seen.Flat.push(title + ": " + r.width + " by " + r.height);
	}
}
document.getElementById("seen").textContent = JSON.stringify(seen);
</script>`

// TestPagesInBrowser has a browser show the pages of the demo and of the benchmarks, with a figure
// in every case, in the light and the dark colours.
func TestPagesInBrowser(t *testing.T) {
	if testkit.Scale(t, 0, 1) == 0 {
		testkit.Skip(t, "only in the tier full")
	}
	browser, err := exec.LookPath("chromium-headless-shell")
	if err != nil {
		testkit.Skip(t, "no chromium-headless-shell")
	}
	var o Options
	for _, tt := range []struct {
		name  string
		plots func(*report.Report) []report.Plot
	}{
		{"demo", func(*report.Report) []report.Plot { return DemoPlots() }},
		{"netcpu", func(r *report.Report) []report.Plot { return NetCPUPlots(r, o) }},
		{"traffic", func(r *report.Report) []report.Plot { return TrafficPlots(r, o) }},
		{"blockio", func(r *report.Report) []report.Plot { return BlockIOPlots(r, o) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := filled(t, tt.name)
			plots := tt.plots(r)
			r.Cases = slices.DeleteFunc(r.Cases, func(c report.Case) bool {
				return !slices.ContainsFunc(plots, func(p report.Plot) bool {
					return p.Metric == c.Metric && slices.ContainsFunc(p.Groups, func(g report.Group) bool { return g.Case == c.Case })
				})
			})
			var page bytes.Buffer
			if err := r.WriteHTML(&page, "fairlead "+tt.name, "What came out, in a sentence.", plots); err != nil {
				t.Fatal(err)
			}
			for scheme, background := range map[string]color.RGBA{"light": {0xff, 0xff, 0xff, 0xff}, "dark": {0x14, 0x16, 0x18, 0xff}} {
				testPage(t, browser, scheme, background, page.String(), len(plots))
			}
		})
	}
}

// filled returns a report of an experiment with figures for every plot. They differ, so that the
// plots can show differences.
func filled(t *testing.T, name string) *report.Report {
	t.Helper()
	r := &report.Report{Bench: name, Rounds: 3, Env: report.Env{Kernel: "6.18.44", CPU: "CPU", CPUs: 2}}
	cases := []string{"idle", "flood"}
	if list := map[string]func(Options) ([]string, error){"netcpu": NetCPUCases, "traffic": TrafficCases, "blockio": BlockIOCases}[name]; list != nil {
		var err error
		if cases, err = list(Options{}); err != nil {
			t.Fatal(err)
		}
	}
	for i, c := range cases {
		for _, m := range []struct {
			metric, unit string
			value        float64
		}{
			{Penalty, "1", 2.13}, {Work, "1/s", 21123}, {Received, "1/s", 234567}, {Requests, "1/s", 4321}, {P99, "s", 1.234e-3},
			{PacketCost, "s", 1.21e-6}, {OfStopwatch, "1", 1.01}, {AgentCPU, "1", 0.0123}, {CPUUsed, "1", 0.87},
			{ShareOf + "one", "1", 0.45}, {P999, "s", 1.23e-3}, {QueueP999, "s", 0.234e-3}, {AsideP999, "s", 12.3e-6},
			{ReceivedBy + "one", "bit/s", 2.87e8}, {WorstSecond, "1", 1.02}, {Total, "bit/s", 9.41e8}, {P50, "s", 45e-6}, {Settling + "a start", "s", 0.345},
			{PartOfIOPS, "1", 0.92}, {TimesP99, "1", 12.3},
		} {
			for round := range 3 {
				v := m.value * (1 + 0.1*float64(i%7) + 0.02*float64(round))
				r.Add(c, m.metric, m.unit, false, 2.5*v)
				r.Add(c, m.metric, m.unit, true, v)
				if name == "traffic" {
					r.AddPeer(c, m.metric, m.unit, "tc", 1.1*v)
					r.AddPeer(c, m.metric, m.unit, "bandwidth", 2.4*v)
				}
			}
		}
	}
	return r
}

func testPage(t *testing.T, browser, scheme string, background color.RGBA, page string, plots int) {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "page.html")
	if err := os.WriteFile(path, []byte(strings.Replace(page, "</body>", look+"</body>", 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	preferred := map[string]string{"dark": "0", "light": "1"}[scheme]
	run := func(args ...string) string {
		var out, errs bytes.Buffer
		cmd := exec.Command(browser, append(args, "--no-sandbox", "--disable-gpu", "--user-data-dir="+filepath.Join(dir, "profile"), "--window-size=1000,6000",
			"--hide-scrollbars", "--enable-logging=stderr", "--blink-settings=preferredColorScheme="+preferred, "file://"+path)...)
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Run(); err != nil {
			t.Fatalf("%v: %s", err, &errs)
		}
		if strings.Contains(errs.String(), ":CONSOLE") {
			t.Errorf("the browser complains: %s", &errs)
		}
		return out.String()
	}
	_, after, _ := strings.Cut(run("--dump-dom"), `<pre id="seen">`)
	text, _, _ := strings.Cut(after, "</pre>")
	var s seen
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		t.Fatalf("%v: %q", err, text)
	}
	if s.Plots != plots || plots == 0 || s.Bars < 2*plots {
		t.Errorf("%s: %d plots with %d bars, want %d plots", scheme, s.Plots, s.Bars, plots)
	}
	if len(s.Requests)+len(s.Covered)+len(s.Flat) > 0 || s.Wide > 0 {
		t.Errorf("%s: %s", scheme, text)
	}

	shot := filepath.Join(dir, "shot.png")
	if keep := os.Getenv("FAIRLEAD_SHOTS"); keep != "" {
		shot = filepath.Join(keep, fmt.Sprintf("%s-%s.png", strings.ReplaceAll(t.Name(), "/", "-"), scheme))
	}
	run("--screenshot=" + shot)
	f, err := os.Open(shot)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	img, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	count := make(map[color.RGBA]int)
	for y := range img.Bounds().Dy() {
		for x := range img.Bounds().Dx() {
			count[color.RGBAModel.Convert(img.At(x, y)).(color.RGBA)]++
		}
	}
	if at := color.RGBAModel.Convert(img.At(1, 1)); at != background {
		t.Errorf("%s: the background is %v, want %v", scheme, at, background)
	}
	if len(count) < 20 {
		t.Errorf("%s: the page has %d colours: it is empty", scheme, len(count))
	}
}
