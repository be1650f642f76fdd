package bpf

import (
	"os"
	"slices"
	"sync"

	"github.com/cilium/ebpf/btf"
)

// typesRead holds types of the kernel that were read for one object, for the next one: to read them
// takes longer than to load most objects. A pool gives the memory back, some megabytes, when
// nothing was loaded during two garbage collections.
var typesRead = sync.Pool{New: func() any { return btf.NewCache() }}

// WithTypes calls do with a cache of the types of the running kernel and its modules. The cache is
// do's alone until it returns.
func WithTypes(do func(*btf.Cache) error) error {
	c := typesRead.Get().(*btf.Cache)
	if !current(c, "/sys/kernel/btf") {
		c = btf.NewCache()
	}
	defer typesRead.Put(c)
	return do(c)
}

// current reports whether the modules that a cache knows are those that dir lists now: the cache
// lists them only once.
func current(c *btf.Cache, dir string) bool {
	known, err := c.Modules()
	if err != nil {
		return false
	}
	entries, err := os.ReadDir(dir) // sorted, as known is
	if err != nil {
		return false
	}
	var loaded []string
	for _, e := range entries {
		if e.Name() != "vmlinux" {
			loaded = append(loaded, e.Name())
		}
	}
	return slices.Equal(known, loaded)
}
