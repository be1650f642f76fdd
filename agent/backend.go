package agent

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/metrics"
	"github.com/fairlead-project/fairlead/policy"
)

var _ serve.Backend = (*Agent)(nil)

// target returns the Target of a container, as of the last round.
func (a *Agent) target(c container.Container) policy.Target {
	a.mu.Lock()
	defer a.mu.Unlock()
	if t, ok := a.targets[c.ID]; ok {
		return t
	}
	return policy.Target{Container: c}
}

// describe converts a container. It calls names only if an error names a device by its number.
func (a *Agent) describe(c container.Container, names func() Devices) api.Container {
	t := a.target(c)
	w := wireContainer(c)
	w.Policy, w.Features = wireSettings(t.Effective()), a.statuses(t)
	for i, s := range w.Features {
		w.Features[i].Error = named(s.Error, names)
		w.Features[i].Asked = asked(t, s.Feature)
	}
	return w
}

// asked reports whether policy or a decision sets a key of a feature to something other than its
// default.
func asked(t policy.Target, feature string) bool {
	return slices.ContainsFunc(t.Origins, func(o policy.Origin) bool {
		return slices.ContainsFunc(policy.Schema(), func(k policy.Key) bool {
			return k.Feature == feature && o.Key == "fairlead."+k.Name && o.Value != k.Default
		})
	})
}

// Containers lists the containers that run now, sorted by name.
func (a *Agent) Containers(context.Context) ([]api.Container, error) {
	out, names := []api.Container{}, sync.OnceValue(a.devices)
	for _, c := range a.set.Snapshot().Containers {
		out = append(out, a.describe(c, names))
	}
	slices.SortFunc(out, func(x, y api.Container) int {
		return cmp.Or(cmp.Compare(x.Name, y.Name), cmp.Compare(x.ID, y.ID))
	})
	return out, nil
}

// Status reports sources, policy and features.
func (a *Agent) Status(context.Context) (api.Status, error) {
	snap := a.set.Snapshot()
	s := api.Status{
		Version: VersionOf(a.cfg.Version), Started: a.started, Complete: snap.Complete, Containers: len(snap.Containers),
		Sources: []api.SourceStatus{}, Policy: a.policyStatus(),
		Features: a.featureTotals(), Changes: len(a.journal.Entries()),
		Recording: a.recorder.status(),
	}
	hints := advice(unexplained(snap.Containers, a.pace.now()))
	for _, src := range snap.Sources {
		w := api.SourceStatus{Name: src.Name, Ready: src.Listed, Containers: src.Records, Partial: src.Partial}
		if src.Pods {
			w.Containers = 0
		}
		if hint, ok := hints[src.Name]; ok {
			w.Error = hint[0] + "; " + hint[1]
		}
		if src.Err != nil {
			w.Error = api.Text(src.Err)
		}
		s.Sources = append(s.Sources, w)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s.Rounds, s.HeldAll = a.rounds.made, a.heldAll
	for id := range a.held {
		s.Held = append(s.Held, id.String())
	}
	slices.Sort(s.Held)
	return s, nil
}

func (a *Agent) policyStatus() api.PolicyStatus {
	st := a.policy.Status()
	a.mu.Lock()
	defer a.mu.Unlock()
	w := api.PolicyStatus{
		Dir: st.Dir, Files: st.Files, Loaded: st.LastSuccess, Tried: st.LastLoad, OK: st.Err == nil,
		Error: api.Text(st.Err), Watch: api.Text(st.WatchErr),
		Problems: wireProblems(a.problems, func(policy.Problem) bool { return true }),
	}
	for _, i := range st.Idle {
		w.Idle = append(w.Idle, api.Idle(i))
	}
	return w
}

// Samples reads the features' samples.
func (a *Agent) Samples(context.Context) (api.Samples, error) {
	out := api.Samples{Features: []api.FeatureSamples{}}
	for _, w := range a.workers {
		out.Features = append(out.Features, wireSamples(w.feature.Name(), w.snapshot()))
	}
	return out, nil
}

// Report asks a feature for its report.
func (a *Agent) Report(ctx context.Context, ask api.Ask) (any, error) {
	return answer(ctx, a, ask, "report", feature.Reporter.Report)
}

// Command asks a feature to do something.
func (a *Agent) Command(ctx context.Context, ask api.Ask) (any, error) {
	return answer(ctx, a, ask, "command", feature.Commander.Command)
}

// answer calls a method of the optional interface T of the feature that ask names.
func answer[T any](ctx context.Context, a *Agent, ask api.Ask, method string, call func(T, context.Context, *container.Container, api.Ask) (any, error)) (out any, err error) {
	var of *container.Container
	id := container.ID(0)
	if ask.Container != "" {
		c, _, err := a.findToRead(ask.Container)
		if err != nil {
			return nil, err
		}
		of, id = &c, c.ID
	}
	for _, f := range a.all {
		if r, ok := f.(T); ok && f.Name() == ask.Feature {
			if hangs := a.hangs(f); hangs != "" {
				return nil, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: hangs}
			}
			if perr := a.fence(f).read(method, id, func() { out, err = call(r, ctx, of, ask) }); perr != nil {
				return nil, uncalled(f, perr)
			}
			return out, err
		}
	}
	return nil, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: ask.Feature + ": this agent has no " + method + " of it"}
}

// Version returns the versions of program and kernel.
func (a *Agent) Version(context.Context) (api.Version, error) {
	return VersionOf(a.cfg.Version), nil
}

// VersionOf adds the program and the kernel to a version.
func VersionOf(version string) api.Version {
	v := api.Version{Version: cmp.Or(version, "unknown"), Go: runtime.Version(), API: "1"}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Commit = s.Value
			}
		}
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		v.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	return v
}

// Reload reads the policy files again, and ends the holds of Restore.
func (a *Agent) Reload(context.Context) (api.PolicyStatus, error) {
	a.reload()
	a.round()
	return a.policyStatus(), nil
}

// freshFor bounds the age of an answer to a container. Containers ask as often as they like, but
// must not make the host read its counters as often.
const freshFor = 250 * time.Millisecond

// Self reports on the container of p to itself.
func (a *Agent) Self(ctx context.Context, p serve.Peer) (api.Self, error) {
	c, ok := a.containerOf(p)
	if !ok {
		return api.Self{}, &api.Error{Status: http.StatusNotFound, Code: "not_found", Text: "the caller is in no container that is known here"}
	}
	t := a.target(c)
	out := api.Self{ID: api.ID(c.ID), Name: c.Name, Policy: wireSettings(t.Effective()), Features: a.statuses(t), Measured: []api.FeatureSamples{}}
	for i, s := range out.Policy { // the origin may reveal other containers or the host
		out.Policy[i] = api.Setting{Key: s.Key, Value: s.Value}
	}
	for i, s := range out.Features {
		if s.Error != "" { // it may reveal the host's configuration
			out.Features[i].Error = "see the host's administrator"
		}
	}
	a.fresh.mu.Lock()
	defer a.fresh.mu.Unlock()
	if now := time.Now(); now.Sub(a.fresh.at) > freshFor {
		a.fresh.at, a.fresh.reports = now, nil
		a.fresh.samples, _ = a.Samples(ctx) // a feature that does not answer is left out
		for _, f := range a.all {
			r, ok := f.(feature.SelfReporter)
			if !ok {
				continue
			}
			// The first to ask may hang up meanwhile.
			fn := func() func(container.Container, *api.SelfReports) { return r.SelfReport(context.WithoutCancel(ctx)) }
			fence := a.fence(f)
			report, err := readBy(fence, "self report", fn)
			if err != nil {
				continue
			}
			a.fresh.reports = append(a.fresh.reports, func(c container.Container, out *api.SelfReports) {
				fence.read("self report", c.ID, func() { report(c, out) }) // a panic costs only this part of the report
			})
		}
	}
	others := func(s api.Sample) bool { // it belongs to another container, or a label names one
		return s.Container != api.ID(c.ID) || slices.ContainsFunc(s.Labels, func(l api.Label) bool { return l.Container != 0 })
	}
	for _, f := range a.fresh.samples.Features {
		f.Samples = slices.DeleteFunc(slices.Clone(f.Samples), others)
		out.Measured = append(out.Measured, f)
	}
	for _, report := range a.fresh.reports {
		report(c, &out.SelfReports)
	}
	return out, nil
}

// Caller returns the container of a peer, or 0 if the agent knows none.
func (a *Agent) Caller(p serve.Peer) api.ID {
	c, _ := a.containerOf(p)
	return api.ID(c.ID)
}

// containerOf finds the container of a peer: its cgroup is the peer's, or the nearest one above it,
// as processes of a container may be in child cgroups.
func (a *Agent) containerOf(p serve.Peer) (container.Container, bool) {
	layout, err := a.layout()
	if err != nil || p.PID == 0 {
		return container.Container{}, false
	}
	paths, err := layout.OfPID(a.cfg.Roots.Proc, p.PID)
	if err != nil {
		return container.Container{}, false
	}
	// No lookup per level: the peer may be thousands deep.
	above := func(dir string) bool { return paths.V2 == dir || strings.HasPrefix(paths.V2, dir+"/") }
	var nearest container.Container
	for _, c := range a.set.Snapshot().Containers {
		if len(c.Cgroup.V2) > max(len(layout.V2), len(nearest.Cgroup.V2)) && above(c.Cgroup.V2) {
			nearest = c
		}
	}
	// A cgroup that was recreated under the same name may be unknown to the Set.
	if id, err := cgroup.ID(nearest.Cgroup.V2); err != nil || nearest.ID == 0 || nearest.ID != container.ID(id) || !p.Same() {
		return container.Container{}, false
	}
	return nearest, true
}

// listenPause is the pause of an optional server before it tries to listen again.
const listenPause = time.Second

// servers opens the sockets, and returns their serving functions. Failing to listen on the agent's
// own socket is an error: only another agent can be listening there. The others are retried.
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

// optional returns a server that the agent can work without, as any local user may take its address
// first. It listens at once if it can, and otherwise retries.
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
