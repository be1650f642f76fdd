package web

import (
	"cmp"
	"embed"
	"fmt"
	"html/template"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/view"
)

//go:embed page.html.tmpl style.css script.js icon.svg
var files embed.FS

// Handler serves the pages to those who have the link.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/{$}", s.page("containers", s.containers))
	mux.HandleFunc("/blame", s.page("blame", s.blame))
	mux.HandleFunc("/c/{id}", s.page("container", s.container))
	for name, kind := range map[string]string{"script.js": "text/javascript", "icon.svg": "image/svg+xml", "style.css": "text/css; charset=utf-8"} {
		mux.HandleFunc("/"+name, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", kind)
			http.ServeFileFS(w, r, files, name)
		})
	}
	return s.g.wrap(mux)
}

// look is what a page shows of which time, as its address says.
type look struct {
	path  string
	order view.Order
	cause string // of blame; "": all
	span  time.Duration
	to    time.Time // the end of the span
	now   bool      // the span goes on
	now0  time.Time // when the page is made
}

// The spans that a page offers, and the bounds of the others.
var spans = []struct {
	Name string
	Span time.Duration
}{{"2 min", 2 * time.Minute}, {"10 min", view.Span}, {"1 h", time.Hour}, {"6 h", 6 * time.Hour}, {"24 h", 24 * time.Hour}}

const (
	minSpan = 20 * time.Second
	maxSpan = 7 * 24 * time.Hour
)

// look reads the address of a page. The times of a recording end where it ends.
func (s *Server) look(r *http.Request) (look, error) {
	q := r.URL.Query()
	l := look{path: r.URL.Path, span: view.Span, now0: s.o.Now(), now: true}
	l.order = view.Order{Sort: q.Get("sort"), Reverse: q.Has("reverse"), Filter: q.Get("filter"), Tree: q.Has("tree")}
	l.cause = q.Get("cause")
	if len(l.order.Filter) > 200 {
		return l, fmt.Errorf("the filter is longer than 200 bytes")
	}
	if text := q.Get("span"); text != "" {
		d, err := time.ParseDuration(text)
		if err != nil {
			return l, fmt.Errorf("%q is no span; want for example 10m", view.ShowText(text))
		}
		l.span = min(max(d, minSpan), maxSpan)
	}
	l.to = l.now0
	if s.agent == nil {
		_, l.to = s.o.Source.Span()
	}
	if text := strings.TrimSpace(q.Get("to")); text != "" {
		t, err := view.When(text, l.to.In(l.now0.Location()))
		if err != nil {
			return l, err
		}
		if t.Before(l.to) {
			l.to, l.now = t, false
		}
	}
	return l, nil
}

// values are the parameters of the address of a page.
func (l look) values(path string) url.Values {
	q := url.Values{}
	set := func(key, value string, is bool) {
		if is {
			q.Set(key, value)
		}
	}
	set("sort", l.order.Sort, l.order.Sort != "")
	set("filter", l.order.Filter, l.order.Filter != "")
	set("reverse", "", l.order.Reverse)
	set("tree", "", l.order.Tree)
	set("cause", l.cause, l.cause != "" && path == "blame")
	set("span", l.span.String(), l.span != view.Span)
	set("to", l.to.UTC().Format(time.RFC3339), !l.now)
	return q
}

// link is the address of a page with another look.
func (l look) link(path string, change func(*look)) string {
	if change != nil {
		change(&l)
	}
	q := l.values(path)
	path = up(l.path) + path
	if len(q) > 0 {
		path += "?" + q.Encode()
	}
	return path
}

// fields are the hidden fields of a form that sets the others.
func (l look) fields(others ...string) (out []choice) {
	q := l.values(l.here())
	for _, key := range slices.Sorted(maps.Keys(q)) {
		if !slices.Contains(others, key) {
			out = append(out, choice{Name: key, Link: q.Get(key)})
		}
	}
	return out
}

// up leads from the path of a page to where all pages are.
func up(path string) string {
	return cmp.Or(strings.Repeat("../", strings.Count(path, "/")-1), "./")
}

// here is the path of the page itself, as link wants it.
func (l look) here() string { return strings.TrimPrefix(l.path, "/") }

// page is what every page has.
type page struct {
	Kind, Title, Host string
	Up                string // leads to where all pages are
	Live              bool   // the page goes on
	State             string // "live" or of which time
	Said              string // the page in a sentence
	Problem           string
	Head              head
	Body              any
}

// head is the bar with the choice of the time.
type head struct {
	Containers, Blame, Now string
	Spans                  []choice
	Earlier, Later         string // "" where there is nothing
	In, Out                string
	To                     string // of the form
	Keep                   []choice
}

// choice is a link, or a hidden field of the form.
type choice struct {
	Name, Link string
	Chosen     bool
}

// page serves one kind of page. fill returns its title, body and a sentence about it.
func (s *Server) page(kind string, fill func(*http.Request, look, *view.History) (page, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		l, err := s.look(r)
		if err != nil {
			s.problem(w, r, http.StatusBadRequest, err)
			return
		}
		s.mu.Lock() // not while it asks or writes: others look meanwhile, and follow goes on
		live, fail := s.live, s.fail
		s.mu.Unlock()
		h, err := s.window(r.Context(), live, l.to, l.span, l.now)
		if err != nil {
			s.problem(w, r, http.StatusInternalServerError, err)
			return
		}
		// What the address calls now is the newest overview, so that plots end with a value.
		if _, last := h.Bounds(); l.now && !last.IsZero() && last.Before(l.to) {
			l.to = last
		}
		p, err := fill(r, l, h)
		if err != nil {
			s.problem(w, r, http.StatusNotFound, err)
			return
		}
		p.Kind, p.Live = kind, l.now && s.agent != nil
		p.Head = s.head(l)
		p.State = l.to.In(l.now0.Location()).Format(time.DateTime)
		if p.Live {
			p.State = "live"
		}
		switch {
		case p.Live && fail != nil:
			p.Problem = "The agent does not answer: " + api.Text(fail)
		case h.Cut:
			p.Problem = "Of this time, " + view.ErrRoom.Error() + "."
		case h.Len() == 0 && p.Live:
			p.Problem = "The first figures come with the second reading, in " + view.Every.String() + "."
		case h.Len() == 0:
			p.Problem = "Nothing is recorded of this time."
		}
		s.write(w, l.path, http.StatusOK, p)
	}
}

// problem serves a page that says what is wrong.
func (s *Server) problem(w http.ResponseWriter, r *http.Request, status int, err error) {
	l := look{path: r.URL.Path, span: view.Span, now: true, now0: s.o.Now()}
	s.write(w, r.URL.Path, status, page{Kind: "problem", Title: http.StatusText(status), Problem: err.Error(), Head: s.head(l)})
}

func (s *Server) write(w http.ResponseWriter, path string, status int, p page) {
	p.Up, p.Host = up(path), view.Show(s.o.Title)
	t := template.Must(template.ParseFS(files, "page.html.tmpl")) // embedded
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	t.Execute(w, p) // an error means that the browser is gone
}

// head makes the bar of a look.
func (s *Server) head(l look) head {
	move := func(d time.Duration) func(*look) {
		return func(l *look) { l.to, l.now = l.to.Add(d), false }
	}
	zoom := func(f float64) func(*look) {
		return func(l *look) {
			l.span = min(max(time.Duration(float64(l.span)*f).Round(time.Second), minSpan), maxSpan)
		}
	}
	h := head{
		Containers: l.link("", nil), Blame: l.link("blame", nil),
		Now:     l.link(l.here(), func(l *look) { l.now = true }),
		Earlier: l.link(l.here(), move(-l.span/2)),
		In:      l.link(l.here(), zoom(0.5)), Out: l.link(l.here(), zoom(2)),
	}
	if !l.now {
		h.Later = l.link(l.here(), move(l.span/2))
		h.To = l.to.In(l.now0.Location()).Format(time.DateTime)
	}
	for _, x := range spans {
		h.Spans = append(h.Spans, choice{x.Name, l.link(l.here(), func(l *look) { l.span = x.Span }), x.Span == l.span})
	}
	h.Keep = l.fields("to")
	return h
}

// container is the address of the page of a container.
func (l look) container(id api.ID) string {
	return l.link("c/"+strconv.FormatUint(uint64(id), 10), func(l *look) { l.order = view.Order{} })
}
