package api

import "strconv"

// ID identifies a container: the inode number of its cgroup v2 directory. It is unique until
// the next boot. 0 is no container. In JSON it is a string, in decimal.
type ID uint64

// String returns the ID in decimal.
func (id ID) String() string { return strconv.FormatUint(uint64(id), 10) }

// IDPrefix makes a reference to a container an id, whatever containers are called.
const IDPrefix = "id:"

// Ref is the reference that means the container with an id and no other.
func Ref(id ID) string { return IDPrefix + id.String() }
