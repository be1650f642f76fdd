package web

import (
	"crypto/rand"
	"crypto/subtle"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
)

// guard lets those in who have the link. Everybody on the host can connect to a loopback address,
// and every page that a browser shows can send requests to it.
//
// The first request has the token in its query, and gets a cookie for the later ones. The token
// counts once: the command line of what opens the link shows it to everybody. Browsers send
// a cookie to all ports of a host, so the cookie is bound to a path that others do not know.
type guard struct {
	token, cookie string // secrets
	path          string // in front of all pages; begins and ends with a slash
	spent         atomic.Bool
}

const cookieName = "fairlead"

func newGuard() *guard {
	return &guard{token: rand.Text(), cookie: rand.Text(), path: "/" + strings.ToLower(rand.Text()[:10]) + "/"}
}

func (g *guard) link() string { return g.path + "?token=" + g.token }

func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// policy allows what the server itself serves, and no script or style inside a page.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// wrap returns next behind the guard. next sees paths below g.path, with a slash in front.
func (g *guard) wrap(next http.Handler) http.Handler {
	pages := http.StripPrefix(strings.TrimSuffix(g.path, "/"), next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		first := r.Method == http.MethodGet && r.URL.Path == g.path && r.URL.Query().Has("token")
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		switch {
		case !loopback(r.Host):
			http.Error(w, "this page is served to this host only", http.StatusMisdirectedRequest)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			h.Set("Allow", "GET, HEAD")
			http.Error(w, "this page changes nothing", http.StatusMethodNotAllowed)
		case first && same(r.URL.Query().Get("token"), g.token):
			if !g.knows(r) && !g.spent.CompareAndSwap(false, true) {
				http.Error(w, "the link works once, and has been opened: run `fairlead web` again", http.StatusForbidden)
				return
			}
			http.SetCookie(w, &http.Cookie{Name: cookieName, Value: g.cookie, Path: g.path, HttpOnly: true, SameSite: http.SameSiteStrictMode})
			// Not a redirect: after one from another site's link the browser would leave the
			// cookie out. The token must not stay in the address.
			h.Set("Content-Type", "text/html; charset=utf-8")
			h.Set("Refresh", "0; url="+g.path)
			w.Write([]byte(`<!DOCTYPE html><html lang="en"><title>fairlead</title><p><a href="` + g.path + `">fairlead</a></p></html>`))
		case first, !strings.HasPrefix(r.URL.Path, g.path), !g.knows(r):
			http.Error(w, "open the link that `fairlead web` has printed", http.StatusForbidden)
		default:
			pages.ServeHTTP(w, r)
		}
	})
}

func (g *guard) knows(r *http.Request) bool {
	return slices.ContainsFunc(r.CookiesNamed(cookieName), func(c *http.Cookie) bool { return same(c.Value, g.cookie) })
}

// loopback reports whether a Host header names this host by what nobody else can make resolve to
// it: with another name the request may come from a page that has rebound its own. The port may be
// another one: that of a tunnel.
func loopback(host string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	if name == "localhost" {
		return true
	}
	ip := net.ParseIP(strings.Trim(name, "[]"))
	return ip != nil && ip.IsLoopback()
}
