package block

import (
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Remote is the path to a disk across the network.
type Remote struct {
	Transport string // "iSCSI", "NVMe/TCP", "NVMe/RDMA", "NBD"
	Paths     []Path // as far as the kernel reports them; none for NBD
}

// Path is one connection of a disk.
type Path struct {
	To, From netip.Addr // From is not valid where the route determines it
	Device   string     // the network device that it is bound to; "" where the route determines it
}

var session = regexp.MustCompile(`/session[0-9]+/`)

// FindRemote returns how a disk, such as vda, is reached across the network, as far as sysfs shows
// it. ok is false for any other disk.
func FindRemote(sys, disk string) (r Remote, ok bool) {
	dir, err := filepath.EvalSymlinks(filepath.Join(sys, "block", disk))
	if err != nil {
		return r, false
	}
	if strings.HasPrefix(disk, "nbd") {
		_, err := os.Stat(filepath.Join(dir, "pid")) // it exists while the disk is connected
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
	// A namespace lies below its controller. With several paths, it lies below a subsystem that
	// links to the controllers.
	linked, _ := filepath.Glob(filepath.Join(filepath.Dir(dir), "nvme*"))
	for _, c := range append([]string{filepath.Dir(dir)}, linked...) {
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

// fabric parses a controller's address, "traddr=192.0.2.1,trsvcid=4420,src_addr=...".
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
