package bpf

import (
	"os"
	"slices"
	"sync"

	"github.com/cilium/ebpf/btf"
)

// typesRead keeps kernel types that were read for one object for the next: reading them takes
// longer than loading most objects. As a pool, it frees this memory, some megabytes, if nothing was
// loaded during two garbage collections.
var typesRead = sync.Pool{New: func() any { return btf.NewCache() }}

// WithTypes calls do with a cache of the types of the running kernel and its modules. do has
// exclusive use of the cache.
func WithTypes(do func(*btf.Cache) error) error {
	c := typesRead.Get().(*btf.Cache)
	if !current(c, "/sys/kernel/btf") {
		c = btf.NewCache()
	}
	defer typesRead.Put(c)
	return do(c)
}

// current reports whether a cache knows the modules that dir lists now. A cache lists them only
// once.
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
