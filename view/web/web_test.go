package web

import (
	"context"
	"errors"
	"html"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	xhtml "golang.org/x/net/html"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/test/viewtest"
	"github.com/fairlead-project/fairlead/view"
)

// recorded serves the recording of ten minutes of a host with 12 containers, of which one is
// slowed after the first five minutes.
func recorded(t testing.TB) *Server {
	t.Helper()
	rec := viewtest.Recording{Host: viewtest.Host{Containers: 12, Every: 5 * time.Second, Calm: 60}, Count: 121}
	_, last := rec.Span()
	return New(Options{
		Source: rec, Title: "host <b>" + viewtest.Hostile, Now: func() time.Time { return last.Add(time.Hour) },
		Text: func(x api.Explanation, _ bool, _ time.Time) string {
			return view.Show(x.Container.Name) + "\n<script>alert(2)</script> policy"
		},
	})
}

// get asks a server as a browser with the link does. path is below that of the guard.
func get(s *Server, path string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, "http://127.0.0.1:4711"+s.g.path+strings.TrimPrefix(path, "/"), nil)
	r.AddCookie(&http.Cookie{Name: cookieName, Value: s.g.cookie})
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, r)
	return w
}

func TestGuard(t *testing.T) {
	s := recorded(t)
	other := newGuard()
	cookie := &http.Cookie{Name: cookieName, Value: s.g.cookie}
	for _, tt := range []struct {
		name, method, host, path string
		cookie                   *http.Cookie
		want                     int
	}{
		{"link without a page", "HEAD", "127.0.0.1:4711", s.g.link(), nil, 403},
		{"link", "GET", "127.0.0.1:4711", s.g.link(), nil, 200},
		{"link again", "GET", "127.0.0.1:4711", s.g.link(), nil, 403},
		{"link in the same browser", "GET", "127.0.0.1:4711", s.g.link(), cookie, 200},
		{"cookie", "GET", "127.0.0.1:4711", s.g.path, cookie, 200},
		{"tunnel", "GET", "localhost:1", s.g.path, cookie, 200},
		{"IPv6", "GET", "[::1]:1", s.g.path, cookie, 200},
		{"no cookie", "GET", "127.0.0.1:4711", s.g.path, nil, 403},
		{"other token", "GET", "127.0.0.1:4711", s.g.path + "?token=" + other.token, nil, 403},
		{"other token with cookie", "GET", "127.0.0.1:4711", s.g.path + "?token=" + other.token, cookie, 403},
		{"empty token", "GET", "127.0.0.1:4711", s.g.path + "?token=", nil, 403},
		{"other cookie", "GET", "127.0.0.1:4711", s.g.path, &http.Cookie{Name: cookieName, Value: other.cookie}, 403},
		{"token for a cookie", "GET", "127.0.0.1:4711", s.g.path, &http.Cookie{Name: cookieName, Value: s.g.token}, 403},
		{"token at another page", "GET", "127.0.0.1:4711", s.g.path + "blame?token=" + s.g.token, nil, 403},
		{"other path", "GET", "127.0.0.1:4711", other.path, cookie, 403},
		{"root", "GET", "127.0.0.1:4711", "/?token=" + s.g.token, cookie, 403},
		{"rebound name", "GET", "evil.example:4711", s.g.path, cookie, 421},
		{"rebound name with link", "GET", "evil.example", s.g.link(), nil, 421},
		{"like an address", "GET", "127.0.0.1.evil.example:4711", s.g.path, cookie, 421},
		{"other address", "GET", "192.0.2.1:4711", s.g.path, cookie, 421},
		{"no host", "GET", "", s.g.path, cookie, 421},
		{"post", "POST", "127.0.0.1:4711", s.g.path, cookie, 405},
		{"delete", "DELETE", "127.0.0.1:4711", s.g.link(), nil, 405},
		{"script without cookie", "GET", "127.0.0.1:4711", s.g.path + "script.js", nil, 403},
		{"script", "GET", "127.0.0.1:4711", s.g.path + "script.js", cookie, 200},
		{"out of the pages", "GET", "127.0.0.1:4711", s.g.path + "../page.go", cookie, 404},
		{"no such page", "GET", "127.0.0.1:4711", s.g.path + "nothing", cookie, 404},
	} {
		r := httptest.NewRequest(tt.method, "http://x"+tt.path, nil)
		if r.Host = tt.host; tt.cookie != nil {
			r.AddCookie(tt.cookie)
		}
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, r)
		if got := w.Code; got != tt.want && !(tt.want == 404 && got/100 == 3) {
			t.Errorf("%s: status %d, want %d", tt.name, got, tt.want)
		}
		for name, want := range map[string]string{"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"} {
			if got := w.Header().Get(name); got != want {
				t.Errorf("%s: %s is %q, want %q", tt.name, name, got, want)
			}
		}
		set := w.Result().Cookies()
		if !strings.HasPrefix(tt.name, "link") || tt.want != 200 {
			if len(set) > 0 || strings.Contains(w.Body.String(), s.g.token) || strings.Contains(w.Body.String(), s.g.cookie) {
				t.Errorf("%s: the answer has a cookie or a secret", tt.name)
			}
			continue
		}
		if len(set) != 1 || set[0].Value != s.g.cookie || !set[0].HttpOnly || set[0].SameSite != http.SameSiteStrictMode || set[0].Path != s.g.path {
			t.Errorf("cookie %v", set)
		}
		if got := w.Header().Get("Refresh"); got != "0; url="+s.g.path {
			t.Errorf("the link leads to %q", got)
		}
	}
}

// links are the addresses in a page.
var links = regexp.MustCompile(`href="([^"]*)"`)

// TestEveryLink follows every link from the first page, to a depth, and looks at each page.
func TestEveryLink(t *testing.T) {
	s := recorded(t)
	seen := map[string]bool{"": true}
	for todo := []string{""}; len(todo) > 0 && len(seen) < 250; todo = todo[1:] {
		w := get(s, todo[0])
		if w.Code != http.StatusOK {
			t.Errorf("%q: status %d: %s", todo[0], w.Code, w.Body)
			continue
		}
		if !strings.HasPrefix(w.Header().Get("Content-Type"), "text/html") {
			continue
		}
		inspect(t, todo[0], w.Body.String())
		base := &url.URL{Path: "/" + strings.SplitN(todo[0], "?", 2)[0]}
		for _, m := range links.FindAllStringSubmatch(w.Body.String(), -1) {
			to, err := base.Parse(html.UnescapeString(m[1]))
			if err != nil || to.Host != "" {
				t.Errorf("%q: link %q: %v", todo[0], m[1], err)
				continue
			}
			to.Fragment = ""
			if next := strings.TrimPrefix(to.String(), "/"); !seen[next] {
				seen[next] = true
				todo = append(todo, next)
			}
		}
	}
	for _, want := range []string{"blame", "c/1", "blame?cause=packets", "?sort=cpu", "?tree=", "?span=1h0m0s"} {
		if !seen[want] {
			t.Errorf("no link leads to %q", want)
		}
	}
}

var forbidden = regexp.MustCompile(`(?i) style=|<style| on[a-z]+=|javascript:|<script>|<script [^>]*>[^<]|https?://|@import|NaN|<iframe|<b>evil|<script>alert|<base|%!`)

// inspect looks for what no page may have: markup of others, code and styles in the page, what a
// browser would fetch elsewhere, and characters that are not shown as such.
func inspect(t *testing.T, name, text string) {
	t.Helper()
	if bad := forbidden.FindString(text); bad != "" {
		t.Errorf("page %q has %q", name, bad)
	}
	if i := strings.IndexFunc(text, func(r rune) bool {
		return r < ' ' && r != '\n' && r != '\t' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == '\u202e' || r == '\ufffd'
	}); i >= 0 {
		t.Errorf("page %q has the character %q in %q", name, text[i], text[max(0, i-60):i])
	}
}

func TestContainers(t *testing.T) {
	s := recorded(t)
	text := get(s, "").Body.String()
	rows := regexp.MustCompile(`<th scope="row"[^>]*>(?:<a [^>]*>)?([^<]*)`).FindAllStringSubmatch(text, -1)
	h, err := view.Load(context.Background(), s.o.Source, time.Time{}, time.Time{})
	must(t, err)
	_, last := h.Bounds()
	o, _ := h.At(last)
	want := view.Rows(o, view.Order{})
	if len(rows) != len(want) {
		t.Fatalf("%d rows, want %d", len(rows), len(want))
	}
	for i, r := range want {
		if got := html.UnescapeString(rows[i][1]); got != r.Label() {
			t.Errorf("row %d is %q, want %q", i, got, r.Label())
		}
		for _, c := range view.Columns() {
			if !strings.Contains(text, html.EscapeString(c.Cell(r))) && !strings.Contains(html.UnescapeString(text), strings.TrimSpace(c.Cell(r))) {
				t.Errorf("no %s %q of %s", c.Head, c.Cell(r), r.Label())
			}
		}
	}
	if !strings.Contains(text, "db-1 runs ") || !strings.Contains(text, "flood: packets") {
		t.Errorf("the first page does not say who is slowed by whom")
	}
	if early := get(s, "?to=2026-11-26T12:03:00Z").Body.String(); !strings.Contains(early, "No container is slowed") {
		t.Error("three minutes after the start a container is slowed")
	}
	if one := get(s, "?filter=web-07").Body.String(); strings.Count(one, `<th scope="row"`) != 1 {
		t.Errorf("filter shows %d rows", strings.Count(one, `<th scope="row"`))
	}
	if hostile := get(s, "?"+url.Values{"filter": {`"><script>alert(1)</script>`}, "sort": {`"><b>evil`}}.Encode()); hostile.Code != 200 {
		t.Errorf("hostile query: %d", hostile.Code)
	} else {
		inspect(t, "hostile query", hostile.Body.String())
	}
}

func TestBlame(t *testing.T) {
	text := get(recorded(t), "blame?span=2m").Body.String()
	row := regexp.MustCompile(`(?s)<tr><th scope="row"[^>]*><a href="./c/1[^>]*>db-1</a></th>(.*?)</tr>`).FindStringSubmatch(text)
	if row == nil {
		t.Fatalf("no row of db-1 in\n%s", text)
	}
	cells := regexp.MustCompile(`<td class="n heat( h\d+)?( empty)?"( title="packets [^"]*")?>`).FindAllStringSubmatch(row[1], -1)
	if len(cells) != 3 || cells[0][1] == "" || cells[0][3] == "" {
		t.Errorf("cells of flood, evil and all: %q in %s", cells, row[1])
	}
	if disk := get(recorded(t), "blame?cause=disk").Body.String(); strings.Contains(disk, "<td") || !strings.Contains(disk, "no container was slowed") {
		t.Error("with the cause disk there is blame")
	}
}

func TestContainer(t *testing.T) {
	s := recorded(t)
	text := get(s, "c/1").Body.String()
	for _, want := range []string{"It runs ", "<h2>Slowed by</h2>", "flood", "<h2>CPU</h2>", "netcpu = isolate", "&lt;script&gt;alert(2)&lt;/script&gt; policy", `class="stroke ink-packets"`} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q", want)
		}
	}
	if n := strings.Count(text, "<svg"); n != 6 {
		t.Errorf("%d plots, want 6", n)
	}
	for path, want := range map[string]int{"c/3": 200, "c/999": 404, "c/x": 404, "c/": 404, "?span=x": 400, "?to=soon": 400, "?span=9999h": 200, "?span=-1s": 200, "?to=2099-01-01": 400, "?to=14:05": 200,
		"?to=1999-01-01+00:00": 200, "?filter=" + strings.Repeat("x", 201): 400} {
		w := get(s, path)
		if w.Code != want {
			t.Errorf("%s: status %d, want %d", path, w.Code, want)
		}
		if w.Code != 404 {
			inspect(t, path, w.Body.String())
		}
	}
}

// TestLive looks at an agent that answers, that does not, and that answers again.
func TestLive(t *testing.T) {
	live := &viewtest.Live{Host: viewtest.Host{Containers: 6, Every: view.Every, Calm: 1}}
	now := viewtest.Start
	s := New(Options{Source: live, Title: "host", Now: func() time.Time { return now }})
	ask := func() string {
		s.ask(t.Context())
		now = now.Add(view.Every)
		return get(s, "").Body.String()
	}
	if text := ask(); !strings.Contains(text, "The first figures come") || !strings.Contains(text, `data-live="true"`) {
		t.Errorf("first page: %s", text)
	}
	ask()
	if text := ask(); !strings.Contains(text, "db-1 runs ") || strings.Contains(text, `class="problem"`) {
		t.Errorf("third page: %s", text)
	}
	live.Fail = errors.New("connection <refused>")
	if text := ask(); !strings.Contains(text, "The agent does not answer: connection &lt;refused&gt;") || !strings.Contains(text, "db-1") {
		t.Errorf("without the agent: %s", text)
	}
	live.Fail = nil
	if text := ask(); strings.Contains(text, "does not answer") {
		t.Errorf("with the agent again: %s", text)
	}
	if text := get(s, "?to=2026-11-26T12:00:04Z").Body.String(); strings.Contains(text, `data-live="true"`) || !strings.Contains(text, "to the newest") {
		t.Errorf("a page of the past goes on: %s", text)
	}
}

// stalled is a client that reads nothing.
type stalled struct {
	*httptest.ResponseRecorder
	wrote chan bool
	read  chan bool
}

func (s stalled) Write(p []byte) (int, error) {
	s.wrote <- true
	<-s.read
	return s.ResponseRecorder.Write(p)
}

// A reader that stalls stops neither the agent's frames nor the pages of others.
func TestStalledReader(t *testing.T) {
	s := New(Options{Source: &viewtest.Live{Host: viewtest.Host{Containers: 6, Every: view.Every}}, Now: func() time.Time { return viewtest.Start }})
	s.ask(t.Context())
	w := stalled{httptest.NewRecorder(), make(chan bool, 1000), make(chan bool)}
	ended := make(chan bool)
	go func() {
		s.page("containers", s.containers)(w, httptest.NewRequest(http.MethodGet, "/", nil))
		close(ended)
	}()
	<-w.wrote
	s.ask(t.Context())
	if code := get(s, "").Code; code != http.StatusOK {
		t.Errorf("beside it a page has the status %d", code)
	}
	close(w.read)
	<-ended
}

func TestServe(t *testing.T) {
	s := recorded(t)
	srv := httptest.NewUnstartedServer(nil) // for its listener
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, srv.Listener) }()
	answer, err := http.Get(s.Link(srv.Listener.Addr()))
	must(t, err)
	if body, err := io.ReadAll(answer.Body); err != nil || answer.StatusCode != 200 || len(answer.Cookies()) != 1 {
		t.Errorf("%v, %v: %s", answer.Status, err, body)
	}
	answer.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if cancel(); <-done != nil {
		t.Errorf("Serve: %v", <-done)
	}
}

// FuzzAddress asks for pages with any query: it is refused, or the page is made of elements of ours.
func FuzzAddress(f *testing.F) {
	for _, query := range []string{"", "sort=cpu&reverse&tree", "span=90s&to=12:07", `filter="><script>alert(1)</script>`, "filter=' onload=x&sort=<b>", "to=10+min+ago", "cause=<i>", "%zz", "span=-9h&to=\x00"} {
		f.Add("", query)
		f.Add("blame", query)
	}
	s := recorded(f)
	f.Fuzz(func(t *testing.T, path, query string) {
		r := httptest.NewRequest(http.MethodGet, "http://127.0.0.1/", nil)
		r.URL.Path, r.URL.RawQuery = s.g.path+path, query
		r.AddCookie(&http.Cookie{Name: cookieName, Value: s.g.cookie})
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, r)
		if w.Code >= 500 {
			t.Fatalf("status %d: %s", w.Code, w.Body)
		}
		if !strings.HasPrefix(w.Header().Get("Content-Type"), "text/html") || w.Code/100 == 3 {
			return
		}
		scripts := 0
		for z := xhtml.NewTokenizer(w.Body); ; {
			kind := z.Next()
			if kind == xhtml.ErrorToken {
				break
			}
			tok := z.Token()
			if kind != xhtml.StartTagToken && kind != xhtml.SelfClosingTagToken {
				continue
			}
			switch tok.Data {
			case "script":
				scripts++
			case "b", "i", "iframe", "img", "base", "object", "style":
				if tok.Data != "i" && tok.Data != "b" || len(tok.Attr) > 1 {
					t.Fatalf("element %v", tok)
				}
			}
			for _, a := range tok.Attr {
				if strings.HasPrefix(a.Key, "on") || a.Key == "style" || a.Key == "href" && strings.Contains(strings.SplitN(a.Val, "?", 2)[0], ":") {
					t.Fatalf("attribute %s=%q of %s", a.Key, a.Val, tok.Data)
				}
			}
		}
		if scripts != 1 {
			t.Fatalf("%d scripts", scripts)
		}
	})
}
