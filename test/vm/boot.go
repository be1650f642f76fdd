// Package vm runs the tests of other packages on kernels other than this machine's. It unpacks a
// kernel of Debian's, puts static test binaries and the modules that they need into an initramfs,
// boots that in QEMU's software emulation, and reads the results from the serial port. The guests
// have only cgroup v2, as most container hosts do.
//
// Results count, timings do not: an emulated CPU is some twenty times slower. /dev/kvm is not used
// even if it exists, so that a run is the same everywhere. Only the tests of this package call it.
package vm

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// Run is what the tests of one package printed in a guest.
type Run struct {
	Output []byte // in the form that go tool test2json reads
	Status string // exit status; "" if the guest stopped before the tests ended
}

// Result is the result of one guest.
type Result struct {
	Release string         // of the kernel, as uname -r gives it; "" if it never started
	Runs    map[string]Run // by Test.name
	Done    bool           // the guest ran to its end
	CPU     time.Duration  // that it took of this machine's
	Notes   []string       // modules that could not be loaded
}

// board is the machine that QEMU emulates for an architecture.
type board struct {
	emulator, machine, cpu string
	kernel                 string   // parameters of its own
	port                   []string // makes the port to which the tests write
	device                 string   // what the guest calls that port
}

// boards are the boards by architecture, in Go's words.
func boards() map[string]board {
	return map[string]board{
		// An old CPU: what a new one has beyond it (SMAP, protection keys, AVX, a fifth level of
		// page tables) slows emulation by a fifth. Without cx16: QEMU 7.2 now and then leaves wrong
		// flags after a cmpxchg16b, and the slab allocator of 6.12 then crashes. Kernels use
		// another way if the CPU lacks it. Trust the clock of the CPU. QEMU derives it and the
		// HPET, which the kernel compares it with, from one clock of the host. But if this thread
		// had to wait between the two readings, the kernel gives up the CPU's clock. It then asks
		// an emulated device for every time, is two or three times slower, and waits for seconds
		// with the lock of all network devices held. Do not let the kernel test whether the timer
		// interrupts it: if this thread has to wait during the test, the kernel finds no working
		// timer, and panics at boot.
		"amd64": {"qemu-system-x86_64", "pc", "Nehalem,-cx16", "console=ttyS0 no_timer_check tsc=reliable",
			[]string{"-serial", "chardev:tests"}, "ttyS1"},
		// The board has one port, so the tests' port is a PCI card. This CPU signs no pointers,
		// because that makes emulation much slower.
		"arm64": {"qemu-system-aarch64", "virt", "cortex-a57", "console=ttyAMA0",
			[]string{"-device", "pci-serial,chardev=tests"}, "ttyS0"},
	}
}

// Boot starts the kernel that was unpacked at root with the initramfs, and with a disk unless that
// is "". It waits until the guest has stopped, and returns its output. It stops a guest that takes
// longer than limit, and the Result has what was printed by then. The logs stay in dir.
func Boot(ctx context.Context, arch, root, initramfs, disk, dir string, limit time.Duration) (Result, error) {
	images, _ := filepath.Glob(filepath.Join(root, "boot/vmlinuz-*"))
	if len(images) == 0 { // since 7.x it lies with the modules
		images, _ = filepath.Glob(filepath.Join(root, "usr/lib/modules/*/vmlinuz"))
	}
	if len(images) != 1 {
		return Result{}, fmt.Errorf("%s holds %d kernel images, want 1", root, len(images))
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	log := filepath.Join(dir, "tests.log")
	// Use one thread for both CPUs. With one each, a CPU at times ran code that the other was
	// patching (a jump label) half old and half new, and 6.12 died of an invalid instruction in
	// get_page_from_freelist. Several guests run at once, so this machine's CPUs are busy anyway.
	// The tests of this machine's kernel, which run beside it, go first, but must not starve it: 10
	// is a tenth of their weight.
	b := boards()[arch]
	if disk != "" {
		b.port = append(b.port, "-drive", "file="+disk+",format=raw,if=virtio,cache=unsafe")
	}
	cmd := exec.CommandContext(ctx, "nice", append([]string{"-n", "10", b.emulator,
		"-machine", b.machine, "-accel", "tcg,thread=single", "-cpu", b.cpu, "-smp", cmp.Or(os.Getenv("VM_CPUS"), "2"), "-m", "2048",
		"-nodefaults", "-display", "none", "-no-reboot",
		"-kernel", images[0], "-initrd", initramfs,
		"-append", "panic=-1 oops=panic loglevel=5 mitigations=off nokaslr cgroup_no_v1=all " + b.kernel + " " + os.Getenv("VM_BOOT"),
		"-serial", "file:" + filepath.Join(dir, "console.log"),
		"-netdev", "hubport,hubid=0,id=nic", "-device", "virtio-net-pci,netdev=nic", // a NIC that leads nowhere
		"-chardev", "file,id=tests,path=" + log}, b.port...)...)
	// A guest must not outlive a killed test run. The signal comes when the thread that started the
	// guest ends, so that thread must be kept.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && ctx.Err() == nil {
		if errors.As(err, &exit) {
			err = fmt.Errorf("qemu: %w: %s", err, out)
		}
		return Result{}, err
	}
	f, err := os.Open(log)
	if err != nil {
		return Result{}, err
	}
	defer f.Close()
	res, err := parse(f)
	res.CPU = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	return res, err
}

// parse reads the output of init.sh and the tests at the second serial port.
func parse(r io.Reader) (Result, error) {
	res := Result{Runs: map[string]Run{}}
	var name string
	var run Run
	keep := func() {
		if name != "" {
			res.Runs[name] = run
		}
		name, run = "", Run{}
	}
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadString('\n')
		text := strings.TrimRight(line, "\r\n")
		// Text that a test prints without a line end comes before our mark.
		before, mark, ok := strings.Cut(text, "@@@ ")
		if !ok {
			run.Output = append(append(run.Output, text...), '\n')
		} else {
			if before != "" {
				run.Output = append(append(run.Output, before...), '\n')
			}
			word, rest, _ := strings.Cut(mark, " ")
			switch word {
			case "kernel":
				res.Release = rest
			case "no":
				res.Notes = append(res.Notes, mark)
			case "begin":
				keep()
				name = rest
			case "end":
				_, run.Status, _ = strings.Cut(rest, " ")
				keep()
			case "done":
				res.Done = true
			}
		}
		if err == io.EOF {
			keep()
			return res, nil
		}
		if err != nil {
			return res, err
		}
	}
}
