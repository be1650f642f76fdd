package probe

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

const (
	maxProcesses = 100_000
	maxFile      = 1 << 20
	maxNamed     = 5 // limits how many devices, files or processes a Detail lists
)

// owners examines which other programs use the hooks and knobs that fairlead uses. Full means that
// there are none, or none that conflict; Degraded means that fairlead leaves another program alone.
func owners(ctx context.Context, cfg Config) answers {
	a := answers{"cni": cni(cfg), "firewall-rules": rules()}
	hooks(ctx, a)
	processes(cfg, a)
	return a
}

// crowd records the other owners, and the places that each one holds.
type crowd map[string][]string

func (c crowd) add(owner, place string) { c[owner] = append(c[owner], place) }

func (c crowd) String() string {
	var parts []string
	for _, owner := range slices.Sorted(maps.Keys(c)) {
		places := c[owner]
		named := strings.Join(places[:min(len(places), maxNamed)], " ")
		if len(places) > maxNamed {
			named += fmt.Sprintf(" and %d more", len(places)-maxNamed)
		}
		parts = append(parts, owner+" ("+named+")")
	}
	return strings.Join(parts, ", ")
}

// answer returns why and mend if there are other owners.
func (c crowd) answer(why, mend string) answer {
	if len(c) == 0 {
		return full("nobody else")
	}
	return degraded(why, mend).with(c.String())
}

// hooks examines the devices of our own network namespace.
func hooks(ctx context.Context, a answers) {
	const why, mend = "programs of others are attached to devices here", "none is needed: they are left in place, and ps says where they keep packets from a limit"
	xdp, tc, tcx, qdiscs := crowd{}, crowd{}, crowd{}, crowd{}
	links, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		a.all(refused(fmt.Errorf("list devices: %w", err), ""), "xdp-programs", "tc-programs", "tcx-programs", "qdiscs")
		return
	}
	names := make(map[int]string)
	for _, l := range links {
		at := l.Attrs()
		names[at.Index] = at.Name
		if at.Xdp != nil && at.Xdp.Attached {
			addProgram(xdp, ebpf.ProgramID(at.Xdp.ProgId), at.Name)
		}
	}
	a["xdp-programs"] = xdp.answer("XDP programs of others are attached to devices here", "none is needed: they are left in place, and tc drops the packets there, which is later and costs more")
	switch err := queryTCX(ctx, links, tcx); {
	case err == nil:
		a["tcx-programs"] = tcx.answer(why, mend)
	case !errors.Is(err, ebpf.ErrNotSupported):
		a["tcx-programs"] = refused(err, "")
	case unix.Geteuid() != 0: // the library reports any refusal as a missing feature
		a["tcx-programs"] = refused(fmt.Errorf("query tcx: %w", unix.EPERM), "")
	default:
		a["tcx-programs"] = full("this kernel has no tcx")
	}

	list, err := netlink.QdiscList(nil)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		a.all(refused(fmt.Errorf("list qdiscs: %w", err), ""), "tc-programs", "qdiscs")
		return
	}
	for _, q := range list {
		at := q.Attrs()
		switch {
		case ctx.Err() != nil: // filters take a request for each qdisc
		case q.Type() == "clsact" || q.Type() == "ingress":
			filters(at.LinkIndex, names[at.LinkIndex], tc)
		case at.Parent == netlink.HANDLE_ROOT && at.Handle != 0 && at.Handle != qdisc.Handle: // the kernel's default qdiscs have no handle
			qdiscs.add(q.Type(), names[at.LinkIndex])
		}
	}
	a["tc-programs"] = tc.answer(why, mend)
	a["qdiscs"] = qdiscs.answer("somebody has set up qdiscs at devices here", "remove them from the uplinks that fairlead is to shape")
}

// ours reports whether a program has one of the names that fairlead gives its programs.
func ours(program string) bool {
	return strings.HasPrefix(program, "fl_") || strings.HasPrefix(program, "fairlead") || program == progName
}

func addProgram(c crowd, id ebpf.ProgramID, device string) {
	name := fmt.Sprintf("program %d", id)
	if p, err := ebpf.NewProgramFromID(id); err == nil {
		if info, err := p.Info(); err == nil && info.Name != "" {
			name = info.Name
		}
		p.Close()
	}
	if !ours(name) {
		c.add(name, device)
	}
}

func queryTCX(ctx context.Context, links []netlink.Link, c crowd) error {
	for _, l := range links {
		if err := ctx.Err(); err != nil {
			return err
		}
		for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			r, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: at})
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) {
				continue // no program was ever attached there, or the device has gone
			}
			if errors.Is(err, unix.EINVAL) {
				return ebpf.ErrNotSupported
			}
			if err != nil {
				return fmt.Errorf("query tcx of %s: %w", l.Attrs().Name, err)
			}
			for _, p := range r.Programs {
				addProgram(c, p.ID, l.Attrs().Name)
			}
		}
	}
	return nil
}

// filters adds the BPF filters at both hooks of a device.
func filters(index int, name string, c crowd) {
	dev := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		list, err := netlink.FilterList(dev, parent)
		if err != nil {
			continue // the device has gone, or the hook is not there
		}
		for _, f := range list {
			if b, ok := f.(*netlink.BpfFilter); ok && !ours(b.Name) {
				c.add(b.Name, name)
			} else if !ok {
				c.add(f.Type()+" filter", name)
			}
		}
	}
}

// cni examines the plugins that Kubernetes runs for each pod.
func cni(cfg Config) answer {
	dir := filepath.Join(cfg.Etc, "cni/net.d")
	names, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return full("not here: there is no " + dir)
	}
	if err != nil {
		return refused(err, "")
	}
	seen := crowd{}
	for _, n := range names {
		if ext := filepath.Ext(n.Name()); ext != ".conf" && ext != ".conflist" && ext != ".json" {
			continue
		}
		text, err := readLimited(filepath.Join(dir, n.Name()))
		if err != nil {
			continue // it has gone, or is not a file
		}
		for _, typ := range plugins(text) {
			seen.add(typ, n.Name())
		}
	}
	if len(seen) == 0 {
		return full("no plugin is configured")
	}
	var why []string
	if seen["cilium-cni"] != nil {
		why = append(why, "cilium has programs of its own at the host end of every veth")
	}
	if seen["bandwidth"] != nil {
		why = append(why, "the bandwidth plugin puts a qdisc at the host end of the veths that it limits")
	}
	if len(why) == 0 {
		return full(seen.String())
	}
	return degraded(strings.Join(why, "; "), "do not give the same container limits in both places").with(seen.String())
}

// plugins returns the types in a CNI configuration, or in a list of them. It returns none for any
// other text.
func plugins(text []byte) []string {
	type plugin struct {
		Type string `json:"type"`
	}
	var conf struct {
		plugin
		Plugins []plugin `json:"plugins"`
	}
	if json.Unmarshal(text, &conf) != nil {
		return nil
	}
	var types []string
	for _, p := range append(conf.Plugins, conf.plugin) {
		if p.Type != "" && len(p.Type) < 100 {
			types = append(types, p.Type)
		}
	}
	return types
}

// processes looks for programs that write the same knobs as fairlead. A process may choose its
// name, so the result is a hint for a person.
func processes(cfg Config, a answers) {
	managers, irq, agents := crowd{}, crowd{}, crowd{}
	d, err := os.Open(cfg.Roots.Proc)
	if err == nil {
		defer d.Close()
		var names []string
		names, err = d.Readdirnames(maxProcesses)
		for _, n := range names {
			pid, bad := strconv.Atoi(n)
			if bad != nil || pid == os.Getpid() {
				continue
			}
			text, bad := readLimited(filepath.Join(cfg.Roots.Proc, n, "comm"))
			if bad != nil {
				continue // it has ended
			}
			switch comm := strings.TrimSpace(string(text)); comm {
			case "kubelet", "koordlet", "rubik", "rubik-agent", "crane-agent":
				managers.add(comm, "pid "+n)
			case "irqbalance":
				irq.add(comm, "pid "+n)
			case "fairlead":
				agents.add(comm, "pid "+n)
			}
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		a.all(refused(err, "mount proc"), "cgroup-managers", "irqbalance", "fairlead-agents")
		return
	}
	a["cgroup-managers"] = managers.answer("others also write to the cgroups of containers, and may undo what fairlead sets", "leave CPU and IO of a container to one of them")
	a["irqbalance"] = irq.answer("irqbalance moves interrupts between CPUs, and receive work with them", "exclude the network's interrupts from it if that matters")
	a["fairlead-agents"] = full(cmp.Or(agents.String(), "no other"))
}

func readLimited(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxFile))
}
