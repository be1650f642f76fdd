package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Doctor reports what this host can do.
func (a *Agent) Doctor(ctx context.Context) (api.Report, error) {
	a.probing.Lock() // its trials have a cost
	defer a.probing.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return append(wireReport(slices.Concat(findings(ctx, a.cfg), examined(a.all, a.examine), offered(a.plugin, &a.guaranteed, a.plugged))), Unmatched(a.policyStatus())...), nil
}

// Unmatched returns findings for policies of files that match no container.
func Unmatched(st api.PolicyStatus) (list api.Report) {
	for _, i := range st.Idle {
		list = append(list, api.Finding{
			Capability: fmt.Sprintf("%s:%d", filepath.Base(i.File), i.Line), Area: "policy",
			Verdict: api.Verdict{Level: api.LevelDegraded,
				Why:  "this policy has matched no container since " + i.Since.Local().Format(time.DateTime),
				Mend: "compare its match with names, images and labels in `fairlead ps -o yaml`, or remove it from " + i.File},
		})
	}
	return list
}

// Examine is Doctor without an agent: it reports what an agent with this configuration could do. It
// makes the features, which change nothing, and closes them again.
func Examine(ctx context.Context, cfg Config) api.Report {
	if cfg.Roots == (kernel.Roots{}) {
		cfg.Roots = kernel.Default()
	}
	r := findings(ctx, cfg)
	who, err := identity.Open(cfg.Roots.Proc)
	if err != nil && !errors.Is(err, fs.ErrPermission) { // each feature tells of a missing right
		r = append(r, probe.Finding{Capability: "identity", Area: probe.Features, Verdict: probe.Verdict{Level: probe.Unavailable, Why: err.Error()}})
	}
	defer who.Close()
	fs, err := features(cfg, watch(cfg, nil, make(parts), nil, nil), nil, who, hook.Open(cfg.Roots.Proc, nil))
	if err != nil {
		return wireReport(append(r, probe.Finding{Capability: "features", Area: probe.Features, Verdict: probe.Verdict{Level: probe.Unavailable, Why: err.Error()}}))
	}
	r = append(r, examined(fs, examine)...)
	for _, f := range fs {
		f.Close() // nothing was applied
	}
	return wireReport(r)
}

func findings(ctx context.Context, cfg Config) probe.Report {
	containerd := cfg.ContainerdAddr
	for _, addr := range discover.ContainerdAddrs() {
		if _, err := os.Stat(addr); containerd == "" && err == nil {
			containerd = addr
		}
	}
	return withEngines(probe.Run(ctx, probe.Config{
		Roots: cfg.Roots, Docker: cfg.DockerHost, Podman: cfg.PodmanHost, Containerd: containerd,
	}), cfg)
}

// examined returns the features' findings about this host, and how each feature is.
func examined(fs []feature.Feature, look func(feature.Feature) (probe.Verdict, []probe.Finding)) (list []probe.Finding) {
	var more []probe.Finding
	for _, f := range fs {
		v, found := look(f)
		list = append(list, probe.Finding{Capability: f.Name(), Area: probe.Features, Verdict: v})
		more = append(more, found...)
	}
	return append(list, more...)
}

// examine asks a feature for its findings.
func examine(f feature.Feature) (probe.Verdict, []probe.Finding) {
	if e, ok := f.(feature.Examiner); ok {
		return f.Support(), e.Examine()
	}
	return f.Support(), nil
}

// examine asks a feature of an agent, unless it does not answer.
func (a *Agent) examine(f feature.Feature) (v probe.Verdict, found []probe.Finding) {
	if what := a.hangs(f); what != "" {
		return probe.Verdict{
			Level: probe.Degraded, Why: what, Mend: "look for its cause in the kernel's log; once that is mended, systemctl restart fairlead",
		}, nil
	}
	fence := a.fence(f)
	fence.read("examine", 0, func() { v, found = examine(f) })
	return fence.verdict(f), found
}
