package bpf

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf/btf"
)

// A cache is used again until a module comes or goes.
func TestTypesCurrent(t *testing.T) {
	c, dir := btf.NewCache(), t.TempDir()
	modules, err := c.Modules()
	must(t, err)
	for _, name := range append(modules, "vmlinux") {
		must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o644))
	}
	if !current(c, dir) {
		t.Errorf("out of date with the modules %q", modules)
	}
	late := filepath.Join(dir, "late")
	must(t, os.WriteFile(late, nil, 0o644))
	if current(c, dir) {
		t.Error("current, though a module was loaded")
	}
	must(t, os.Remove(late))
	must(t, os.Remove(filepath.Join(dir, "vmlinux")))
	if !current(c, dir) {
		t.Error("out of date without vmlinux, which is no module")
	}
	must(t, os.RemoveAll(dir))
	if current(c, dir) {
		t.Error("current, though nothing tells what is loaded")
	}
}
