package probe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"
)

// patience limits how long a runtime may take to answer.
const patience = 700 * time.Millisecond

// runtimes examines the container runtimes. A host without any is normal: the cgroup tree then
// shows the containers.
func runtimes(ctx context.Context, cfg Config) answers {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	a := make(answers)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for name, r := range map[string]struct {
		address string
		ask     func(context.Context, endpoint) (string, error)
	}{
		"docker": {cfg.Docker, askEngine}, "podman": {cfg.Podman, askEngine}, "containerd": {cfg.Containerd, askHTTP2},
	} {
		wg.Go(func() {
			v := answering(ctx, r.address, r.ask)
			mu.Lock()
			defer mu.Unlock()
			a[name] = v
		})
	}
	wg.Wait()
	return a
}

// endpoint is the address on which a runtime listens.
type endpoint struct{ network, address string }

// parseEndpoint parses unix:///path, tcp://host:port, or a path.
func parseEndpoint(s string) (endpoint, error) {
	network, address, ok := strings.Cut(s, "://")
	switch {
	case !ok:
		return endpoint{"unix", s}, nil
	case (network == "unix" || network == "tcp") && address != "":
		return endpoint{network, address}, nil
	}
	return endpoint{}, fmt.Errorf("address %q is neither a path nor unix:// or tcp://", s)
}

func (e endpoint) dial(ctx context.Context) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, e.network, e.address)
}

func answering(ctx context.Context, address string, ask func(context.Context, endpoint) (string, error)) answer {
	e, err := parseEndpoint(address)
	if err != nil {
		return unavailable(err.Error(), "correct the address")
	}
	detail, err := ask(ctx, e)
	switch {
	case err == nil:
		return full(strings.TrimSpace(e.address + " " + detail))
	case errors.Is(err, fs.ErrNotExist):
		return unavailable("not here: there is no "+e.address, "none is needed where it is not used")
	case errors.Is(err, syscall.ECONNREFUSED):
		return degraded("nobody listens at "+e.address, "start it")
	case errors.Is(err, fs.ErrPermission):
		return refused(err, "grant access to "+e.address)
	}
	return degraded("it does not answer: "+reason(err), "look at its log").with(e.address)
}

// askEngine pings the Engine API, which Podman also serves.
func askEngine(ctx context.Context, e endpoint) (string, error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return e.dial(ctx) },
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodHead, "http://localhost/_ping", nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("it answers %s", resp.Status)
	}
	server := resp.Header.Get("Server")
	if len(server) > 100 {
		server = server[:100]
	}
	return strings.ToValidUTF8(server, "?"), nil
}

// askHTTP2 finds out whether a gRPC server, such as containerd, listens on the socket: it must
// greet with a SETTINGS frame (RFC 9113, 3.4).
func askHTTP2(ctx context.Context, e endpoint) (string, error) {
	conn, err := e.dial(ctx)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline() // zero, which sets none, without one
	conn.SetDeadline(deadline)
	const settings = "\x00\x00\x00\x04\x00\x00\x00\x00\x00" // an empty frame
	if _, err := io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"+settings); err != nil {
		return "", err
	}
	var head [9]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return "", err
	}
	if head[3] != settings[3] {
		return "", errors.New("it does not speak HTTP/2")
	}
	return "", nil
}
