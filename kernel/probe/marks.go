package probe

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// markUser is a program that is known to use bits of packets' marks.
type markUser struct {
	name  string
	bits  uint32
	comms []string // what its processes are called
	cni   string   // its CNI plugin
}

// markUsers comes from the unofficial registry of marks (fwmark/registry).
func markUsers() []markUser {
	return []markUser{
		{"Kubernetes", 0x0000c000, []string{"kubelet", "kube-proxy"}, ""},
		{"the CNI plugin portmap", 0x00002000, nil, "portmap"},
		{"Cilium", 0xffff1fff, []string{"cilium-agent"}, "cilium-cni"},
		{"Calico", 0xffff0000, []string{"calico-node", "calico-felix"}, "calico"},
		{"the AWS CNI", 0x00000080, []string{"aws-k8s-agent"}, "aws-cni"},
		{"Weave Net", 0x00060000, []string{"weaver"}, "weave-net"},
		{"Tailscale", 0x000c0000, []string{"tailscaled"}, ""},
	}
}

// marks looks for programs whose bits are among those that fairlead is told to
// use. Processes choose their names, so the result is a hint for a person.
func marks(cfg Config) answer {
	if cfg.Mark == 0 {
		return full("fairlead is to use no bits of it")
	}
	comms := make(map[string]string) // where each was found
	if d, err := os.Open(cfg.Roots.Proc); err == nil {
		names, _ := d.Readdirnames(maxProcesses) // what could be read is looked at
		d.Close()
		for _, n := range names {
			if _, bad := strconv.Atoi(n); bad != nil {
				continue
			}
			if text, err := readLimited(filepath.Join(cfg.Roots.Proc, n, "comm")); err == nil {
				comms[strings.TrimSpace(string(text))] = "pid " + n
			}
		}
	}
	configured := make(map[string]string)
	dir := filepath.Join(cfg.Etc, "cni/net.d")
	files, _ := os.ReadDir(dir) // one that is missing configures nothing
	for _, f := range files {
		text, err := readLimited(filepath.Join(dir, f.Name()))
		if err != nil {
			continue
		}
		for _, typ := range plugins(text) {
			configured[typ] = f.Name()
		}
	}
	seen := crowd{}
	for _, u := range markUsers() {
		if u.bits&cfg.Mark == 0 {
			continue
		}
		name := fmt.Sprintf("%s, %#x", u.name, u.bits)
		for _, c := range u.comms {
			if at := comms[c]; at != "" {
				seen.add(name, c+" "+at)
			}
		}
		if at := configured[u.cni]; at != "" && u.cni != "" {
			seen.add(name, at)
		}
	}
	if len(seen) == 0 {
		return full(fmt.Sprintf("no known user of the bits %#x is on this host", cfg.Mark))
	}
	return degraded(fmt.Sprintf("others use bits of the packets' mark that fairlead is told to use (%#x)", cfg.Mark),
		"choose other bits with mark-mask, or none: it is needed only where something overwrites a packet's priority").with(seen.String())
}
