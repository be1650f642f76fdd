package agent

import (
	"context"
	"net"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/metrics"
)

// listenPause is the pause of an optional server before it tries to listen again.
const listenPause = time.Second

// servers opens the sockets, and returns their serving functions. The agent's own socket takes its
// commands, and only another agent answers there: without it there is an error. The others are
// tried again.
func (a *Agent) servers() (list []func(context.Context) error, err error) {
	if path := a.cfg.Socket; path != "" {
		l, err := serve.Listen(path)
		if err != nil {
			return nil, err
		}
		list = append(list, func(ctx context.Context) error { return serve.Serve(ctx, l, a, a.log) })
	}
	if gid, ok := serve.GroupID(a.cfg.ViewGroup); ok && a.cfg.Socket != "" {
		listen := func() (net.Listener, error) { return serve.ListenView(api.ViewSocket(a.cfg.Socket), gid) }
		list = append(list, a.optional("the socket for looking", listen, func(ctx context.Context, l net.Listener) error {
			return serve.ServeView(ctx, l, a, a.log)
		}))
	}
	if path := a.cfg.SelfSocket; path != "" {
		listen := func() (net.Listener, error) { return serve.ListenSelf(path) }
		list = append(list, a.optional("the socket for containers", listen, func(ctx context.Context, l net.Listener) error {
			return serve.ServeSelf(ctx, l, a, a.log)
		}))
	}
	if addr := a.cfg.MetricsAddr; addr != "" {
		listen := func() (net.Listener, error) { return a.listenMetrics(addr) }
		list = append(list, a.optional("the metrics page", listen, func(ctx context.Context, l net.Listener) error {
			return metrics.Serve(ctx, l, view{a}, a.cfg.MetricsToken, a.log)
		}))
	}
	return list, nil
}

// optional returns a server that the agent works without: any local user may listen at its address
// first. It listens at once if it can.
func (a *Agent) optional(what string, listen func() (net.Listener, error), serve func(context.Context, net.Listener) error) func(context.Context) error {
	l, err := listen()
	return func(ctx context.Context) error {
		told := ""
		for {
			if err == nil {
				if told != "" {
					a.log.Info(what+" is served now", "addr", l.Addr())
				}
				told = ""
				if err = serve(ctx, l); ctx.Err() != nil {
					return err
				}
			}
			if err != nil && err.Error() != told {
				told = err.Error()
				a.log.Warn(what+" is not served; the agent goes on and tries again", "err", err)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(listenPause):
			}
			l, err = listen()
		}
	}
}

// metricsSocket is the prefix of a metrics address that is a unix socket.
const metricsSocket = "unix:"

func checkMetricsAddr(addr string) error {
	if addr == "" || strings.HasPrefix(addr, metricsSocket+"/") {
		return nil
	}
	return metrics.CheckAddr(addr)
}

func (a *Agent) listenMetrics(addr string) (net.Listener, error) {
	if path, ok := strings.CutPrefix(addr, metricsSocket); ok {
		return serve.Listen(path)
	}
	l, err := metrics.Listen(addr)
	if err == nil && !metrics.Loopback(l) && a.cfg.MetricsToken == "" {
		a.log.Warn("the metrics page, which asks for no token (metrics-token-file), can be reached from outside this host", "addr", l.Addr())
	}
	return l, err
}
