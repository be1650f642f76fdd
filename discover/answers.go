package discover

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/moby/moby/client"
)

// An engine's answer about a container contains labels of any size, which the builder of its image
// wrote. A list contains those of all containers, and an event those of one. So lists and events
// are read in outline, and the answer about one container or image up to a bound.
const (
	maxAnswer  = maxBlob // bytes of the answer about one container or image
	maxOutline = 8 << 20 // bytes of a list in outline

	outlineDepth = 2 // depth of an outline: a container in a list, the actor of an event
)

// errAnswer means that an answer exceeds maxAnswer.
var errAnswer = errors.New("the answer is longer than what is read of one")

// limit returns the part of an answer's body to read.
type limit func(*http.Request, io.Reader) io.Reader

// engineClient makes a client for the Docker Engine API at host that reads bodies through limit.
// The caller calls closeIdle after the last use.
func engineClient(host string, limit limit) (c *client.Client, closeIdle func(), err error) {
	at, err := client.ParseHostURL(host)
	if err != nil {
		return nil, nil, err
	}
	dial := &http.Transport{Proxy: http.ProxyFromEnvironment}
	if at.Scheme == "unix" {
		dial.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", at.Host)
		}
	}
	c, err = client.New(client.WithHost(host), client.WithUserAgent("fairlead"), client.WithHTTPClient(&http.Client{
		Transport: limiting{dial, limit}, CheckRedirect: client.CheckRedirect,
	}))
	return c, dial.CloseIdleConnections, err
}

// limiting is a transport that reads the bodies of answers through limit.
type limiting struct {
	next  http.RoundTripper
	limit limit
}

func (l limiting) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := l.next.RoundTrip(req)
	if err == nil {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{l.limit(req, resp.Body), resp.Body}
	}
	return resp, err
}

// whole is a limit that leaves an answer unchanged, up to maxAnswer.
func whole(_ *http.Request, body io.Reader) io.Reader { return &atMost{body, maxAnswer} }

// inOutline is a limit that keeps the outline of an answer. A stream of events has no bound.
func inOutline(req *http.Request, body io.Reader) io.Reader {
	out := &outline{r: body}
	if strings.HasSuffix(req.URL.Path, "/events") {
		return out
	}
	return &atMost{out, maxOutline}
}

// atMost reads up to left bytes, and fails with errAnswer if there are more.
type atMost struct {
	r    io.Reader
	left int
}

func (a *atMost) Read(p []byte) (int, error) {
	n, err := a.r.Read(p)
	if a.left -= n; a.left < 0 {
		return 0, errAnswer
	}
	return n, err
}

// outline reads JSON. It empties objects and arrays deeper than outlineDepth, and cuts strings
// after maxName bytes.
type outline struct {
	r      io.Reader
	depth  int
	text   bool // in a string
	length int  // of that string
	cut    bool // the rest of the string is omitted
	escape int  // remaining bytes of an escape sequence: 5: its letter, 4 to 1: digits
}

func (o *outline) Read(p []byte) (int, error) {
	for {
		n, err := o.r.Read(p)
		kept := p[:0]
		for _, c := range p[:n] {
			if o.keep(c) {
				kept = append(kept, c)
			}
		}
		if len(kept) > 0 || err != nil || len(p) == 0 {
			return len(kept), err
		}
	}
}

func (o *outline) keep(c byte) bool {
	shown := o.depth <= outlineDepth
	if !o.text {
		switch c {
		case '"':
			o.text, o.length = true, 0
		case '{', '[':
			o.depth++
			return shown // the contents may be invalid
		case '}', ']':
			o.depth--
			return o.depth <= outlineDepth
		}
		return shown
	}
	if c == '"' && o.escape == 0 {
		o.text = false
		return shown
	}
	switch {
	case o.escape == 5 && c != 'u':
		o.escape = 0
	case o.escape > 0:
		o.escape--
	default: // a sequence is omitted as a whole
		o.cut = o.length >= maxName
		if c == '\\' {
			o.escape = 5
		}
	}
	o.length++
	return shown && !o.cut
}
