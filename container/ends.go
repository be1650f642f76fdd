package container

import (
	"path/filepath"
	"strconv"
)

// Device identifies a network device by the inode of its namespace and its index there. A rename
// does not change them.
type Device struct {
	NetNS uint64
	Index int
}

// End is a device that packets of a container pass through.
type End struct {
	Device
	Name string
	Path string // of its namespace
	// Host means that it is the host end of a pair, which receives what the container sends.
	// Otherwise it is the container's device itself.
	Host bool
	// Trusted means that no container created the namespace of this host end.
	Trusted bool
	Inside  Interface // the container's device
}

// Ends lists one end for each of the container's devices: the host end if it is known, else the
// device itself. proc is the mount point of proc.
func (c Container) Ends(proc string) []End {
	var list []End
	for _, dev := range c.Interfaces {
		e := End{
			Device: Device{c.NetNS, dev.Index}, Name: dev.Name, Inside: dev,
			Path: filepath.Join(proc, strconv.Itoa(c.PID), "ns", "net"),
		}
		if h := dev.Host; h.NetNS != 0 {
			e.Device, e.Name, e.Path, e.Host, e.Trusted = Device{h.NetNS, h.Index}, h.Name, h.NSPath, true, h.Trusted
		}
		list = append(list, e)
	}
	return list
}
