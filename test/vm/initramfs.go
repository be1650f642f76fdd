package vm

import (
	"bytes"
	"debug/elf"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

//go:embed init.sh
var initScript []byte

//go:embed run.sh
var runScript []byte

// modules are the kernel modules that the guests load, unless their kernel has them built in or
// lacks them.
func modules() []string {
	return []string{
		"virtio_pci", "virtio_net", "veth", "bridge", "br_netfilter", "vxlan", "ifb", "macvlan", "ipvlan", "dummy", "bonding", "8021q",
		"sch_htb", "sch_hfsc", "sch_fq", "sch_fq_codel", "sch_tbf", "sch_prio", "sch_netem", "sch_ingress",
		"cls_bpf", "cls_u32", "cls_matchall", "cls_flower", "act_bpf", "act_gact", "act_mirred", "act_police", "act_skbedit",
		"nf_conntrack", "nf_tables", "nft_chain_nat", "nft_masq", "nft_nat",
		"af_packet", "ipv6", "xfrm_user", "nf_conntrack_netlink", "tcp_diag", "loop", "null_blk", "bfq", "kyber-iosched", "nvmet-tcp", "nvme-tcp",
		"ip_vs", "ip_vs_rr",
	}
}

// Test is a static test binary, the folder of the package that it tests, and the tests that a guest
// runs.
type Test struct {
	Package string // below the module: "kernel/cgroup"
	Binary  string
	Dir     string
	Names   []string // of top-level tests; none are all
	Run     string   // a pattern for -test.run in place of Names
}

// name is the file name of the test in the guest.
func (t Test) name() string { return strings.ReplaceAll(t.Package, "/", "_") }

// pattern returns the pattern for -test.run.
func (t Test) pattern() string {
	if t.Run != "" || len(t.Names) == 0 {
		return t.Run
	}
	return "^(" + strings.Join(t.Names, "|") + ")$"
}

// Root lists the contents of a guest's root file system, beside busybox.
type Root struct {
	Kernel  string   // where a kernel was unpacked, for its modules
	Arch    string   // of the guest
	Program string   // the binary of fairlead, static
	Objects []string // files of BPF objects
	Tests   []Test
	Tier    testkit.Tier
	System  string // a folder with a system of its own, for its disk; "" for none
}

// size returns how many tests it runs.
func (r Root) size() (n int) {
	for _, t := range r.Tests {
		n += len(t.Names)
	}
	return n
}

// busybox returns the path of a static busybox for the guest.
func (r Root) busybox() (string, error) {
	if r.Arch == runtime.GOARCH {
		return "/bin/busybox", nil
	}
	for _, name := range []string{"bin/busybox", "usr/bin/busybox"} {
		if path := filepath.Join(r.Kernel, name); exists(path) {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s has no busybox", r.Kernel)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Write makes the root file system in a new folder, and an initramfs of it. The initramfs is in the
// "newc" form of cpio, which the kernel unpacks. It is uncompressed: an emulated CPU reads faster than it unpacks.
func (r Root) Write(dir, initramfs string) error {
	busybox, err := r.busybox()
	if err != nil {
		return err
	}
	wanted := modules()
	if r.System != "" {
		wanted = append([]string{"virtio_blk", "ext4"}, wanted...)
	}
	found, err := findModules(r.Kernel, wanted)
	if err != nil {
		return err
	}
	files := map[string][]byte{
		"init": initScript, "run.sh": runScript,
		"settings": fmt.Appendf(nil, "export %s=%v\nport=/dev/%s\n", testkit.TierVar, r.Tier, boards()[r.Arch].device),
	}
	links := map[string]string{"bin/busybox": busybox, "bin/fairlead": r.Program} // to files of this machine
	folders := []string{"bin", "dev", "modules", "objects", "patterns", "proc", "root", "run", "src", "sys", "tests", "tmp", "var/lib"}
	for i, m := range found {
		files[fmt.Sprintf("modules/%03d-%s.ko", i, m.name)] = m.data
	}
	for _, path := range r.Objects {
		links["objects/"+filepath.Base(path)] = path
	}
	for _, t := range r.Tests {
		links["tests/"+t.name()], files["patterns/"+t.name()] = t.Binary, []byte(t.pattern())
		folders = append(folders, "src/"+t.name())
		if data := filepath.Join(t.Dir, "testdata"); exists(data) {
			links["src/"+t.name()+"/testdata"] = data
		}
	}
	for _, name := range folders {
		err = errors.Join(err, os.MkdirAll(filepath.Join(dir, name), 0o755))
	}
	for name, data := range files {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), data, 0o755))
	}
	for name, to := range links {
		err = errors.Join(err, os.Symlink(to, filepath.Join(dir, name)))
	}
	if err != nil {
		return err
	}
	return execute("sh", "-ec", `cd "$0"; find -L . | busybox cpio -o -L -H newc >"$1"`, dir, initramfs)
}

// module is the uncompressed file of a kernel module.
type module struct {
	name string
	data []byte
}

// findModules reads the named modules and their dependencies, in the order in which they can be
// loaded. It omits names that are no modules of this kernel: the kernel has them built in, or a
// test will report that it lacks them.
func findModules(kernel string, names []string) ([]module, error) {
	paths := map[string]string{}
	err := filepath.WalkDir(kernel, func(path string, d fs.DirEntry, err error) error {
		if base, _, ok := strings.Cut(filepath.Base(path), ".ko"); ok && err == nil && d.Type().IsRegular() {
			paths[moduleName(base)] = path
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	var found []module
	seen := map[string]bool{}
	var visit func(name string) error
	visit = func(name string) error {
		name = moduleName(name)
		if seen[name] || paths[name] == "" {
			return nil
		}
		seen[name] = true
		data, err := readModule(paths[name])
		if err != nil {
			return err
		}
		deps, err := depends(data)
		if err != nil {
			return fmt.Errorf("read %s: %w", paths[name], err)
		}
		for _, dep := range deps {
			if err := visit(dep); err != nil {
				return err
			}
		}
		found = append(found, module{name, data})
		return nil
	}
	for _, name := range names {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// moduleName returns a module's name as the kernel writes it: a file name may have a dash where the
// kernel has an underscore.
func moduleName(s string) string { return strings.ReplaceAll(s, "-", "_") }

// readModule reads a module's file, which newer kernels compress.
func readModule(path string) ([]byte, error) {
	switch filepath.Ext(path) {
	case ".xz":
		return exec.Command("xz", "-dc", path).Output()
	case ".zst":
		return exec.Command("zstd", "-dcq", path).Output()
	}
	return os.ReadFile(path)
}

// depends reads the names of the modules that a module needs from its
// .modinfo section, a sequence of key=value strings.
func depends(data []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("no section .modinfo")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	for entry := range strings.SplitSeq(string(info), "\x00") {
		if list, ok := strings.CutPrefix(entry, "depends="); ok {
			return slices.DeleteFunc(strings.Split(list, ","), func(s string) bool { return s == "" }), nil
		}
	}
	return nil, nil
}
