package block

import (
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Remote is how a disk behind the network is reached.
type Remote struct {
	Transport string // "iSCSI", "NVMe/TCP", "NVMe/RDMA", "NBD"
	Paths     []Path // as far as the kernel tells: nothing of NBD
}

// Path is one connection of a disk.
type Path struct {
	To, From netip.Addr // From is not valid where the route decides
	Device   string     // the network device that it is bound to; "" where the route decides
}

var session = regexp.MustCompile(`/session[0-9]+/`)

// FindRemote tells whether a disk, as vda, is behind the network, as far as sysfs does; ok
// is false for every other.
func FindRemote(sys, disk string) (r Remote, ok bool) {
	dir, err := filepath.EvalSymlinks(filepath.Join(sys, "block", disk))
	if err != nil {
		return r, false
	}
	if strings.HasPrefix(disk, "nbd") {
		_, err := os.Stat(filepath.Join(dir, "pid")) // it is there while it is connected
		return Remote{Transport: "NBD"}, err == nil
	}
	if at := session.FindStringIndex(dir); at != nil {
		r.Transport = "iSCSI"
		found, _ := filepath.Glob(filepath.Join(dir[:at[1]], "connection*", "iscsi_connection", "connection*"))
		for _, c := range found {
			if to, err := netip.ParseAddr(text(c, "address")); err == nil {
				from, _ := netip.ParseAddr(text(c, "local_ipaddr"))
				r.Paths = append(r.Paths, Path{To: to, From: from})
			}
		}
		return r, true
	}
	// A namespace lies below its controller or, with several paths, below a subsystem that
	// has links to these.
	for _, c := range append([]string{filepath.Dir(dir)}, controllers(filepath.Dir(dir))...) {
		name, known := map[string]string{"tcp": "NVMe/TCP", "rdma": "NVMe/RDMA"}[text(c, "transport")]
		if !known {
			continue
		}
		r.Transport = name
		if p := fabric(text(c, "address")); p.To.IsValid() {
			r.Paths = append(r.Paths, p)
		}
	}
	return r, r.Transport != ""
}

func controllers(subsystem string) []string {
	found, _ := filepath.Glob(filepath.Join(subsystem, "nvme*"))
	return found
}

// fabric reads the address of a controller, "traddr=192.0.2.1,trsvcid=4420,src_addr=...".
func fabric(address string) (p Path) {
	for part := range strings.SplitSeq(address, ",") {
		key, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		a, _ := netip.ParseAddr(value)
		switch key {
		case "traddr":
			p.To = a
		case "host_traddr", "src_addr":
			p.From = a
		case "host_iface":
			p.Device = value
		}
	}
	return p
}
