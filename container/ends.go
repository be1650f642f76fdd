package container

import (
	"path/filepath"
	"strconv"
)

// Device identifies a network device by the inode of its namespace and its index there, which a
// rename does not change.
type Device struct {
	NetNS uint64
	Index int
}

// End is a device that packets of a container pass.
type End struct {
	Device
	Name string
	Path string // of its namespace
	// Host: it is the host end of a pair, which receives what the container sends. Otherwise it is
	// the container's device itself.
	Host bool
	// Trusted: the namespace of this host end was not created by a container.
	Trusted bool
	Inside  Interface // the container's device
}

// Ends lists one end for each of the container's devices: the host end if it was found, else the
// device itself. proc is the root of proc.
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
