package block

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// unique returns what distinguishes a disk from others of its model: its WWID or serial number, or
// else the place where it is attached.
func unique(sys, dir string, d Disk) string {
	if d.Loop != "" {
		return "file " + d.Loop
	}
	for _, x := range []struct{ word, value string }{
		{"wwid", text(dir, "wwid")}, {"wwid", text(dir, "device/wwid")}, // NVMe, and SCSI
		{"serial", unitSerial(dir)}, {"serial", text(dir, "device/serial")}, {"serial", text(dir, "serial")}, // SCSI, NVMe and MMC, virtio
	} {
		if value := strings.Join(strings.Fields(x.value), " "); strings.Trim(value, "0 ") != "" {
			return x.word + " " + value
		}
	}
	return "at " + place(sys, dir)
}

// unitSerial reads the serial number of a SCSI disk: page 0x80 of its vital product data, with its
// length in the third and fourth byte.
func unitSerial(dir string) string {
	data, err := os.ReadFile(filepath.Join(dir, "device/vpd_pg80"))
	if err != nil || len(data) < 4 || data[1] != 0x80 {
		return ""
	}
	n := int(data[2])<<8 | int(data[3])
	return strings.Trim(strings.ToValidUTF8(string(data[4:min(len(data), 4+n)]), ""), "\x00 ")
}

// The parts of a sysfs path that the kernel numbers in the order of discovery. The numbers change
// from boot to boot.
var (
	numbered  = regexp.MustCompile(`^(virtio|nvme)\d+$`)
	scsiHost  = regexp.MustCompile(`^host(\d+)$`)
	target    = regexp.MustCompile(`^target\d+:\d+:\d+$`)
	unit      = regexp.MustCompile(`^\d+:(\d+:\d+:\d+)$`)
	ata       = regexp.MustCompile(`^ata\d+$`)
	namespace = regexp.MustCompile(`^nvme\d+(?:c\d+)?n(\d+)$`)
)

// place returns the position of a disk in the device tree, as /dev/disk/by-path does. It does not
// depend on the order of discovery.
func place(sys, dir string) string {
	rel, err := filepath.Rel(filepath.Join(sys, "devices"), dir)
	if err != nil {
		return dir
	}
	parts := strings.Split(rel, "/")
	var out []string
	for i, p := range parts {
		above := filepath.Join(sys, "devices", filepath.Join(parts[:i]...))
		switch {
		case p == "block", p == "nvme", target.MatchString(p), numbered.MatchString(p):
		case i > 0 && parts[i-1] == "block" && parts[0] != "virtual": // a virtual disk has nothing but its name
		case namespace.MatchString(p):
			out = append(out, "namespace"+namespace.FindStringSubmatch(p)[1])
		case scsiHost.MatchString(p):
			out = append(out, fmt.Sprintf("host+%d", order(above, p)))
		case ata.MatchString(p):
			if port := text(above, filepath.Join(p, "ata_port", p, "port_no")); port != "" {
				p = "port" + port
			}
			out = append(out, p)
		case unit.MatchString(p):
			out = append(out, unit.FindStringSubmatch(p)[1])
		default:
			out = append(out, p)
		}
	}
	return strings.Join(out, "/")
}

// order returns the position of host among the SCSI hosts of one device.
func order(dir, host string) int {
	number := func(name string) int {
		n, _ := strconv.Atoi(strings.TrimPrefix(name, "host")) // the names match scsiHost
		return n
	}
	entries, _ := os.ReadDir(dir)
	own, before := number(host), 0
	for _, e := range entries {
		if scsiHost.MatchString(e.Name()) && number(e.Name()) < own {
			before++
		}
	}
	return before
}
