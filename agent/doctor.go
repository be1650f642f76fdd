package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Doctor reports what this host can do.
func (a *Agent) Doctor(ctx context.Context) (api.Report, error) {
	a.probing.Lock() // the probes are expensive
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
// constructs the features, which changes nothing, and closes them again.
func Examine(ctx context.Context, cfg Config) api.Report {
	if cfg.Roots == (kernel.Roots{}) {
		cfg.Roots = kernel.Default()
	}
	r := findings(ctx, cfg)
	who, err := identity.Open(cfg.Roots.Proc)
	if err != nil && !errors.Is(err, fs.ErrPermission) { // each feature reports a missing privilege itself
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

// examined returns the verdict of each feature, followed by their findings about this host.
func examined(fs []feature.Feature, look func(feature.Feature) (probe.Verdict, []probe.Finding)) (list []probe.Finding) {
	var more []probe.Finding
	for _, f := range fs {
		v, found := look(f)
		list = append(list, probe.Finding{Capability: f.Name(), Area: probe.Features, Verdict: v})
		more = append(more, found...)
	}
	return append(list, more...)
}

// examine asks a feature for its verdict and findings.
func examine(f feature.Feature) (probe.Verdict, []probe.Finding) {
	if e, ok := f.(feature.Examiner); ok {
		return f.Support(), e.Examine()
	}
	return f.Support(), nil
}

// examine does the same for a feature of an agent, unless a call to it hangs.
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

// sinceStart is how long after its start a container may be known by its cgroup alone.
const sinceStart = 10 * time.Second

// unexplained counts the containers in an engine's cgroup that no runtime reports, by engine.
func unexplained(list []container.Container, now time.Time) map[discover.Engine]int {
	found := make(map[discover.Engine]int)
	for _, c := range list {
		if e, ok := discover.EngineOf(c.Cgroup.V2); ok && c.Source == container.CgroupSource && now.Sub(c.Started) >= sinceStart {
			found[e]++
		}
	}
	return found
}

// advice describes the containers that no runtime reports, and what to set, by source.
func advice(found map[discover.Engine]int) map[string][2]string {
	out := make(map[string][2]string)
	order := func(a, b discover.Engine) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.User, b.User))
	}
	for _, e := range slices.SortedFunc(maps.Keys(found), order) {
		source, name, mend := engineWords(e)
		what, they := "containers", "they have"
		if found[e] == 1 {
			what, they = "container", "it has"
		}
		why := fmt.Sprintf("no socket tells of %d %s of %s: here %s neither name nor labels", found[e], what, name, they)
		if was, ok := out[source]; ok {
			why, mend = was[0]+"; "+why, was[1]+"; "+mend
		}
		out[source] = [2]string{why, mend}
	}
	return out
}

// engineWords returns the source for an engine's containers, the engine's name, and what to set.
func engineWords(e discover.Engine) (source, name, mend string) {
	rootless := fmt.Sprintf("/run/user/%d/", e.User)
	const hidden = ", and `ProtectHome=tmpfs` with `BindReadOnlyPaths=%s` in a drop-in of the unit; who has that socket then says what policy its containers have"
	switch {
	case e.Name == "docker" && e.User != 0:
		return e.Name, fmt.Sprintf("the rootless Docker of user %d", e.User), "set --docker-host=unix://" + rootless + "docker.sock" + fmt.Sprintf(hidden, rootless)
	case e.Name == "docker":
		return e.Name, "Docker", "start Docker, or set --docker-host to the address of its socket"
	case e.Name == "podman" && e.User != 0:
		return e.Name, fmt.Sprintf("the rootless Podman of user %d", e.User),
			"run `systemctl --user enable --now podman.socket` as that user, and set --podman-host=unix://" + rootless + "podman/podman.sock" + fmt.Sprintf(hidden, rootless)
	case e.Name == "podman":
		return e.Name, "Podman", "run `systemctl enable --now podman.socket`"
	case e.Name == "containerd":
		return e.Name, "containerd", "set --containerd to the path of its socket, which is none of " + strings.Join(discover.ContainerdAddrs(), ", ")
	}
	return e.Name, "CRI-O", "set --crio to the path of its socket, which is not " + discover.CRIOAddr
}

// withEngines adds the engines with unreported containers to a report of the host.
func withEngines(r probe.Report, cfg Config) probe.Report {
	found, err := discover.Engines(cfg.Roots.Proc, cfg.Roots.Cgroup)
	if err != nil {
		return r // the report's finding about cgroups has the reason
	}
	for e := range found {
		addr := map[string]string{"docker": cfg.DockerHost, "podman": cfg.PodmanHost}[e.Name]
		if _, err := os.Stat(cmp.Or(cfg.CRIOAddr, discover.CRIOAddr)); err == nil && e.Name == "cri-o" {
			delete(found, e) // its source reports failures
		}
		answers := slices.ContainsFunc(r, func(f probe.Finding) bool { return f.Capability == e.Name && f.Level == probe.Full })
		if answers && (e.User == 0 || strings.Contains(addr, fmt.Sprintf("/run/user/%d/", e.User))) {
			delete(found, e)
		}
	}
	for source, says := range advice(found) {
		v := probe.Verdict{Level: probe.Degraded, Why: says[0], Mend: says[1]}
		i := slices.IndexFunc(r, func(f probe.Finding) bool { return f.Capability == source })
		if i < 0 {
			r = append(r, probe.Finding{Capability: "cri-o", Area: "runtime", Verdict: v})
			continue
		}
		if r[i].Level != probe.Full && r[i].Why != "" {
			v.Why = r[i].Why + "; " + v.Why
		}
		r[i].Verdict = v
	}
	return r
}
