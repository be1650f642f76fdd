package agent

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// sinceStart is how long after its start a container may be known only by its cgroup.
const sinceStart = 10 * time.Second

// unexplained counts the containers with an engine's cgroup that no runtime reports.
func unexplained(list []container.Container, now time.Time) map[discover.Engine]int {
	found := make(map[discover.Engine]int)
	for _, c := range list {
		if e, ok := discover.EngineOf(c.Cgroup.V2); ok && c.Source == container.CgroupSource && now.Sub(c.Started) >= sinceStart {
			found[e]++
		}
	}
	return found
}

// advice describes the containers that no runtime reports, and what to set, by their source.
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

// engineWords names an engine, the source for its containers, and what makes that work.
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
		return r // the report has the reason with the cgroups
	}
	for e := range found {
		addr := map[string]string{"docker": cfg.DockerHost, "podman": cfg.PodmanHost}[e.Name]
		if _, err := os.Stat(cmp.Or(cfg.CRIOAddr, discover.CRIOAddr)); err == nil && e.Name == "cri-o" {
			delete(found, e) // its source tells of failures
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
