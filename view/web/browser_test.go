package web

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

var must = testkit.Must

// browser is a Chromium that is driven by the DevTools protocol over pipes.
type browser struct {
	t       *testing.T
	to      *os.File
	from    *bufio.Reader
	session string
	id      int
	console []string // what the browser has complained about
	loaded  int      // pages
}

// start has a browser open the first page of a recording, at base.
func start(t *testing.T) (b *browser, base string) {
	t.Helper()
	if testkit.Scale(t, 0, 1) == 0 {
		testkit.Skip(t, "only in the tier full")
	}
	path, err := exec.LookPath("chromium-headless-shell")
	if err != nil {
		testkit.Skip(t, "no chromium-headless-shell")
	}
	inRead, inWrite, err := os.Pipe()
	must(t, err)
	outRead, outWrite, err := os.Pipe()
	must(t, err)
	cmd := exec.Command(path, "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "--user-data-dir="+t.TempDir(), "about:blank")
	cmd.ExtraFiles = []*os.File{inRead, outWrite}
	must(t, cmd.Start())
	inRead.Close()
	outWrite.Close()
	b = &browser{t: t, to: inWrite, from: bufio.NewReaderSize(outRead, 1<<20)}
	t.Cleanup(func() {
		b.session = ""
		b.call("Browser.close", nil, nil)
		cmd.Wait() // it was closed
		inWrite.Close()
		outRead.Close()
	})
	must(t, outRead.SetReadDeadline(time.Now().Add(2*time.Minute)))
	var target struct{ TargetID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	b.session = attached.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		b.call(domain+".enable", nil, nil)
	}
	s := recorded(t)
	srv := httptest.NewServer(s.Handler())
	t.Cleanup(srv.Close)
	b.open(s.Link(srv.Listener.Addr()), 2)
	return b, srv.URL + s.g.path
}

// leads does something that leads to another page, and waits for that.
func (b *browser) leads(do func()) {
	b.t.Helper()
	loaded := b.loaded
	for do(); b.loaded == loaded; {
		b.read()
	}
}

// message is an answer, or an event.
type message struct {
	ID     int
	Method string
	Params json.RawMessage
	Result json.RawMessage
	Error  *struct{ Message string }
}

// read reads one message, and notes what pages do.
func (b *browser) read() message {
	b.t.Helper()
	data, err := b.from.ReadBytes(0)
	if err != nil {
		b.t.Fatalf("read from the browser: %v", err)
	}
	var m message
	must(b.t, json.Unmarshal(data[:len(data)-1], &m))
	switch m.Method {
	case "Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled":
		b.console = append(b.console, string(m.Params))
	case "Page.loadEventFired":
		b.loaded++
	case "Network.requestWillBeSent":
		if !strings.Contains(string(m.Params), `"url":"http://127.0.0.1:`) {
			b.console = append(b.console, string(m.Params))
		}
	}
	return m
}

func (b *browser) call(method string, params, result any) {
	b.t.Helper()
	b.id++
	request := map[string]any{"id": b.id, "method": method}
	if params != nil {
		request["params"] = params
	}
	if b.session != "" {
		request["sessionId"] = b.session
	}
	data, err := json.Marshal(request)
	must(b.t, err)
	testkit.Must(b.t, testkit.Err(b.to.Write(append(data, 0))))
	for {
		m := b.read()
		if m.ID != b.id {
			continue
		}
		if m.Error != nil {
			b.t.Fatalf("%s: %s", method, m.Error.Message)
		}
		if result != nil {
			must(b.t, json.Unmarshal(m.Result, result))
		}
		return
	}
}

// open loads an address, and waits for so many pages: with a redirect there are two.
func (b *browser) open(address string, pages int) {
	b.t.Helper()
	want := b.loaded + pages
	b.call("Page.navigate", map[string]any{"url": address}, nil)
	for b.loaded < want {
		b.read()
	}
}

// eval evaluates an expression in the page, whatever its policy on content.
func (b *browser) eval(expression string, result any) {
	b.t.Helper()
	var out struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails json.RawMessage
	}
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &out)
	if out.ExceptionDetails != nil {
		b.t.Fatalf("%s: %s", expression, out.ExceptionDetails)
	}
	if result != nil {
		must(b.t, json.Unmarshal(out.Result.Value, result))
	}
}

func (b *browser) key(name string, code int, text string) {
	for _, kind := range []string{"keyDown", "keyUp"} {
		b.call("Input.dispatchKeyEvent", map[string]any{"type": kind, "key": name, "code": name, "windowsVirtualKeyCode": code, "text": text}, nil)
	}
}

// shoot keeps a picture of the page in the folder FAIRLEAD_SHOTS, if that is set.
func (b *browser) shoot(name string) {
	dir := os.Getenv("FAIRLEAD_SHOTS")
	if dir == "" {
		return
	}
	var shot struct{ Data string }
	b.call("Page.captureScreenshot", map[string]any{"format": "png", "captureBeyondViewport": true}, &shot)
	data, err := base64.StdEncoding.DecodeString(shot.Data)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name+".png"), data, 0o644)
	}
	testkit.Check(b.t, err)
}

// layout finds in a page what a reader would stumble over.
const layout = `(() => {
	const out = {Wide: document.documentElement.scrollWidth - innerWidth, Small: [], Out: [], Styles: document.styleSheets.length,
		Background: getComputedStyle(document.body).backgroundColor, Plots: [...document.querySelectorAll(".area svg")].map(s => s.getBoundingClientRect().height)};
	for (const e of document.querySelectorAll("body *")) {
		const r = e.getBoundingClientRect(), s = getComputedStyle(e);
		if (r.width === 0 || r.height === 0 || e.closest("svg") || e.closest(".skip")) continue;
		if ([...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && parseFloat(s.fontSize) < 11) out.Small.push(e.outerHTML.slice(0, 80));
		if ((r.right > innerWidth + 1 || r.left < -1) && !e.closest(".scroll") && !e.closest("thead")) out.Out.push(e.outerHTML.slice(0, 80));
	}
	for (const e of document.querySelectorAll(".scroll")) // a matrix may be as wide as it likes
		if (e.scrollWidth > e.clientWidth + 1 && !e.querySelector(".matrix")) out.Out.push(e.outerHTML.slice(0, 80));
	return out;
})()`

type seen struct {
	Wide       float64
	Small, Out []string
	Styles     int
	Background string
	Plots      []float64
}

// TestInBrowser looks at each page in a browser: wide and as on a phone, light and dark.
func TestInBrowser(t *testing.T) {
	b, base := start(t)
	var address string
	if b.eval("location.href", &address); address != base {
		t.Errorf("the link leads to %s, want %s", address, base)
	}
	for scheme, background := range map[string]string{"light": "rgb(255, 255, 255)", "dark": "rgb(20, 22, 24)"} {
		b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}}, nil)
		for _, width := range []int{360, 1280} {
			b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}, nil)
			for name, path := range map[string]string{"containers": "", "tree": "?tree", "blame": "blame", "container": "c/1", "hostile": "c/3", "problem": "c/99"} {
				console := len(b.console)
				b.open(base+path, 1)
				var is seen
				b.eval(layout, &is)
				where := fmt.Sprintf("%s-%s-%d", name, scheme, width)
				if is.Wide > 0 || len(is.Small)+len(is.Out) > 0 || is.Styles != 1 || is.Background != background {
					t.Errorf("%s: %+v", where, is)
				}
				if slices.ContainsFunc(is.Plots, func(h float64) bool { return h < 100 }) || len(is.Plots) != map[string]int{"containers": 1, "tree": 1, "container": 6, "hostile": 6}[name] {
					t.Errorf("%s: plots %v", where, is.Plots)
				}
				if name != "problem" { // whose status the browser logs
					for _, m := range b.console[console:] {
						t.Errorf("%s: the browser complains: %s", where, m)
					}
				}
				b.shoot(where)
			}
		}
	}
}

// focused describes what has the focus, and whether that can be seen.
const focused = `(() => {
	const e = document.activeElement, s = getComputedStyle(e), r = e.getBoundingClientRect();
	return {What: e.outerHTML.slice(0, 100), Tag: e.tagName, Href: e.getAttribute("href") || "", Outline: s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0, On: r.right > 0 && r.bottom > 0};
})()`

// TestKeyboard goes through a page by the key Tab, and opens a container and a plot by keys.
func TestKeyboard(t *testing.T) {
	b, _ := start(t)
	var want int
	b.eval(`[...document.querySelectorAll('a, button, input:not([type="hidden"]), summary, [tabindex="0"]')].length`, &want)
	type focus struct {
		What, Tag, Href string
		Outline, On     bool
	}
	seen := make(map[string]bool)
	found := false
	for range want {
		b.key("Tab", 9, "")
		var f focus
		b.eval(focused, &f)
		seen[f.What+f.Href] = true
		if !f.Outline || !f.On {
			t.Errorf("the focus cannot be seen on %s", f.What)
		}
		if f.Href == "./c/1" {
			found = true
		}
	}
	if len(seen) < want*9/10 || !found {
		t.Errorf("Tab reaches %d of %d, db-1: %v", len(seen), want, found)
	}
	b.eval(`document.querySelector('tbody a[href="./c/1"]').focus()`, nil)
	b.leads(func() { b.key("Enter", 13, "\r") })
	b.eval(`document.querySelector(".area").focus()`, nil)
	b.leads(func() { b.key("+", 187, "+") })
	var address string
	if b.eval("location.search", &address); address != "?span=5m0s" {
		t.Errorf("+ at a plot leads to %q", address)
	}
	// What the pointer does, on the way: the values below it, and the zoom.
	b.eval(`document.querySelector(".area").scrollIntoView()`, nil)
	var at struct{ X, Y, W float64 }
	b.eval(`(() => { const r = document.querySelector(".area").getBoundingClientRect(); return {X: r.left, Y: r.top + r.height/2, W: r.width}; })()`, &at)
	move := func(kind string, part float64, buttons int) {
		b.call("Input.dispatchMouseEvent", map[string]any{"type": kind, "x": at.X + part*at.W, "y": at.Y, "button": "left", "buttons": buttons, "clickCount": 1}, nil)
	}
	move("mouseMoved", 0.9, 0)
	var tip string
	if b.eval(`document.querySelector(".tip").innerText`, &tip); !strings.Contains(tip, "packets") || !strings.Contains(tip, "%") {
		t.Errorf("below the pointer is %q", tip)
	}
	b.shoot("pointer")
	move("mousePressed", 0.5, 1)
	move("mouseMoved", 0.7, 1)
	b.leads(func() { move("mouseReleased", 0.7, 0) })
	if b.eval("location.search", &address); !strings.HasPrefix(address, "?span=60s&to=2026-11-26T12") && !strings.HasPrefix(address, "?span=59s&to=") && !strings.HasPrefix(address, "?span=61s&to=") {
		t.Errorf("dragging leads to %q", address)
	}
	for _, m := range b.console {
		t.Errorf("the browser complains: %s", m)
	}
}
