// Package probe finds out what this host supports by trying it: it loads a program, makes a qdisc,
// moves a kernel thread, and undoes each. A version number would be less reliable, because
// distributions backport features and sandboxes forbid them.
//
// It tries everything in a separate network namespace and cgroup, which are gone when it returns.
// Only a kernel module that the kernel loaded for a trial may stay. It decides nothing: each
// feature tests its own requirements. It speaks rtnetlink itself, because it tries operations that
// no other part of fairlead performs yet.
//
// Package agent runs it for `fairlead doctor`, with an agent or without.
package probe

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"strings"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel"
)

const (
	limit = 10 * time.Second
	// grace is the part of the time limit that is left for a group to return its findings so
	// far.
	grace = 400 * time.Millisecond
)

// Finding is the answer to one question about the host.
type Finding struct {
	Capability string // unique; it stays the same from version to version
	Area       string // host, cgroup, sched, bpf, net, runtime or owner; Features, or an area of a feature's own
	Verdict
	Detail string // what the probe saw
}

// Features is the Area of the features' own state. Each feature is a capability.
const Features = "feature"

// Report lists all findings. Run always returns the same ones in the same order.
type Report []Finding

// Config says where to look. Empty fields stand for the usual places.
type Config struct {
	Roots      kernel.Roots
	Run, Etc   string // "/run" and "/etc"
	Docker     string // address of the Engine API: unix:///path, or a path
	Podman     string
	Containerd string
	Timeout    time.Duration // of Run; ten seconds
}

// Run answers all questions. It also works without root: a capability that cannot be tried is
// Unavailable, with the reason. So is a question without an answer at the end of Timeout; its trial
// is still undone in the background.
func Run(ctx context.Context, cfg Config) Report {
	cfg = cfg.withDefaults()
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout-grace)
	defer cancel()
	over := time.After(cfg.Timeout)
	groups := []func(context.Context, Config) answers{host, cgroups, programs, types, runtimes, owners}
	found := make(chan answers, len(groups))
	for _, g := range groups {
		go func() { found <- g(ctx, cfg) }()
	}
	got := make(answers)
	for range groups {
		select {
		case a := <-found:
			maps.Copy(got, a)
		case <-over:
			return report(got)
		}
	}
	return report(got)
}

func (c Config) withDefaults() Config {
	c.Roots = cmp.Or(c.Roots, kernel.Default())
	c.Run, c.Etc = cmp.Or(c.Run, "/run"), cmp.Or(c.Etc, "/etc")
	c.Docker = cmp.Or(c.Docker, "/run/docker.sock")
	c.Podman = cmp.Or(c.Podman, "/run/podman/podman.sock")
	c.Containerd = cmp.Or(c.Containerd, "/run/containerd/containerd.sock")
	c.Timeout = cmp.Or(c.Timeout, limit)
	return c
}

// questions lists the capabilities by area, in the order of the Report.
func questions() []Finding {
	var list []Finding
	for _, area := range []string{
		"host: kernel root capabilities pid-namespace systemd psi",
		"cgroup: cgroup-v2 cgroup-layout cgroup-cpu cgroup-cpuset cgroup-io cfs-bandwidth",
		"sched: group-fairness kthread-cgroup kthread-throttling softirq-charge",
		"bpf: btf bpf-jit bpffs bpf-tp-btf bpf-fentry bpf-cgroup-id bpf-ringbuf bpf-tc bpf-tcx bpf-xdp",
		"net: netns veth napi-threaded napi-netlink qdisc-clsact qdisc-htb qdisc-hfsc qdisc-fq",
		"runtime: docker podman containerd",
		"owner: xdp-programs tc-programs tcx-programs qdiscs firewall-rules cni cgroup-managers irqbalance fairlead-agents",
	} {
		name, caps, _ := strings.Cut(area, ":")
		for c := range strings.FieldsSeq(caps) {
			list = append(list, Finding{Capability: c, Area: name})
		}
	}
	return list
}

func report(got answers) Report {
	list := questions()
	for i := range list {
		a, ok := got[list[i].Capability]
		if !ok {
			a = unavailable("it did not answer in time", "try again when the host is less busy")
		}
		list[i].Verdict = Verdict{Level: a.Level, Why: printable(a.Why), Mend: a.Mend}
		list[i].Detail = printable(a.detail)
	}
	return list
}

// printable removes characters that a terminal would interpret: other programs choose the names of
// devices, files and servers.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

// answers are the findings of one group by capability.
type answers map[string]answer

// all gives several questions the same answer.
func (a answers) all(same answer, capabilities ...string) {
	for _, c := range capabilities {
		a[c] = same
	}
}

type answer struct {
	Verdict
	detail string
}

func full(detail string) answer { return answer{Verdict{Level: Full}, detail} }

func degraded(why, mend string) answer {
	return answer{Verdict{Level: Degraded, Why: why, Mend: mend}, ""}
}

func unavailable(why, mend string) answer {
	return answer{Verdict{Level: Unavailable, Why: why, Mend: mend}, ""}
}

func (a answer) with(detail string) answer {
	a.detail = detail
	return a
}

// asRoot is the Mend of any trial that was refused for lack of privilege.
const asRoot = "run as root, outside of user namespaces"

// refused converts the error of a trial to an answer.
func refused(err error, mend string) answer {
	if unix.Geteuid() != 0 && (errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES)) {
		mend = asRoot
	}
	return unavailable(reason(err), mend)
}

// reason returns an error as one line of bounded length, without the verifier's log.
func reason(err error) string {
	const most = 300
	text := strings.Join(strings.Fields(err.Error()), " ")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "..."
	}
	return text
}
