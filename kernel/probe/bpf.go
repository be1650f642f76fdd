package probe

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// errNoBTF means that the kernel does not describe its types.
var errNoBTF = errors.New("the kernel does not describe its types (no BTF)")

const (
	progName = "flprobe"
	mendBTF  = "use a kernel with CONFIG_DEBUG_INFO_BTF: those of Debian 11, Ubuntu 20.10, RHEL 8.2 and later have it"
)

// programs examines the parts of BPF that need neither types nor a device.
func programs(_ context.Context, cfg Config) answers {
	return answers{"bpf-jit": jit(), "bpffs": bpffs(cfg), "bpf-ringbuf": ringbuf()}
}

// types examines the kernel's types, and the programs that need them.
func types(_ context.Context, cfg Config) answers {
	cache := btf.NewCache() // reading them takes longer than everything else here
	spec, err := kernelTypes(cfg.Roots, cache)
	if err != nil {
		a := answers{"btf": refused(err, mendBTF)}
		a.all(unavailable(errNoBTF.Error(), mendBTF), "bpf-tp-btf", "bpf-fentry", "bpf-cgroup-id", "kthread-throttling", "softirq-charge")
		return a
	}
	return answers{
		"btf":                full(""),
		"kthread-throttling": throttling(spec),
		"softirq-charge":     softirqCharge(cfg.Roots, spec),
		"bpf-tp-btf":         load(tracing(ebpf.AttachTraceRawTp, "softirq_entry"), cache, "use a kernel that allows BPF programs at tracepoints: without them nothing can be measured"),
		"bpf-fentry":         load(tracing(ebpf.AttachTraceFEntry, "ip_rcv"), cache, "none is needed: tracepoints are used instead"),
		"bpf-cgroup-id":      load(tracing(ebpf.AttachTraceRawTp, "softirq_entry", asm.FnGetCurrentCgroupId.Call()), cache, "use a kernel with CONFIG_CGROUPS and bpf_get_current_cgroup_id"),
	}
}

// tracing returns a program that only makes the given calls.
func tracing(at ebpf.AttachType, to string, calls ...asm.Instruction) *ebpf.ProgramSpec {
	return &ebpf.ProgramSpec{
		Name: progName, Type: ebpf.Tracing, AttachType: at, AttachTo: to, License: "GPL",
		Instructions: append(calls, asm.Mov.Imm(asm.R0, 0), asm.Return()),
	}
}

// classifier returns a program that lets every packet pass, for tc and for XDP.
func classifier(t ebpf.ProgramType) *ebpf.ProgramSpec {
	verdict := int32(0) // TC_ACT_OK
	if t == ebpf.XDP {
		verdict = 2 // XDP_PASS
	}
	return &ebpf.ProgramSpec{
		Name: progName, Type: t, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()},
	}
}

// load loads one program and closes it.
func load(spec *ebpf.ProgramSpec, cache *btf.Cache, mend string) answer {
	one := &ebpf.CollectionSpec{Programs: map[string]*ebpf.ProgramSpec{progName: spec}}
	c, err := ebpf.NewCollectionWithOptions(one, ebpf.CollectionOptions{Cache: cache})
	if err != nil {
		return refused(loading(err), mend)
	}
	c.Close()
	return full("")
}

// loading rewords a refusal: the library's text suggests a limit that kernels since 5.11 do not
// have.
func loading(err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("the kernel refuses to load such a program: %w", unix.EPERM)
	}
	return err
}

func ringbuf() answer {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: progName, Type: ebpf.RingBuf, MaxEntries: uint32(os.Getpagesize())})
	if err != nil {
		return refused(err, "none is known")
	}
	m.Close()
	return full("")
}

// jit loads a program and checks whether the kernel has compiled it. The sysctl is not reliable:
// only the initial network namespace has it, but the kernel also compiles for an agent in another
// one, such as a container or a test node.
func jit() answer {
	prog, err := ebpf.NewProgram(classifier(ebpf.SchedCLS))
	if err != nil {
		return refused(loading(err), "use a kernel that allows BPF programs at tc hooks")
	}
	defer prog.Close()
	info, err := prog.Info()
	if err != nil {
		return refused(err, "")
	}
	if _, err := info.JitedSize(); err != nil {
		return degraded("programs are interpreted, which is several times slower", "sysctl net.core.bpf_jit_enable=1")
	}
	return full("")
}

func bpffs(cfg Config) answer {
	mend := "mount -t bpf bpf " + cfg.Roots.BPFFS
	var st unix.Statfs_t
	if err := unix.Statfs(cfg.Roots.BPFFS, &st); err != nil {
		return refused(fmt.Errorf("%s: %w", cfg.Roots.BPFFS, err), mend)
	}
	if st.Type != unix.BPF_FS_MAGIC {
		return unavailable("no BPF file system is mounted at "+cfg.Roots.BPFFS, mend)
	}
	return full(cfg.Roots.BPFFS)
}

// KthreadsThrottled reports whether CFS bandwidth throttles kernel threads as it does tasks. Since
// 6.18 a task throttles itself on its return to user mode, where a kernel thread never goes
// (kernel/sched/fair.c, task_throttle_setup_work): such a kernel charges the thread and lets it
// run. A work item for that in task_struct identifies these kernels. Error: no BTF.
func KthreadsThrottled(r kernel.Roots) (yes bool, err error) {
	return ask(r, throttled)
}

// ask answers a question about the kernel's types.
func ask(r kernel.Roots, question func(*btf.Spec) (bool, error)) (yes bool, err error) {
	err = bpf.WithTypes(func(cache *btf.Cache) error {
		spec, err := kernelTypes(r, cache)
		if err != nil {
			return err
		}
		yes, err = question(spec)
		return err
	})
	return yes, err
}

// kernelTypes reads the types of the kernel, through cache if they belong to the running kernel.
func kernelTypes(r kernel.Roots, cache *btf.Cache) (*btf.Spec, error) {
	name := filepath.Join(r.Sys, "kernel/btf/vmlinux")
	if _, err := os.Stat(name); err != nil {
		return nil, fmt.Errorf("%w: %w", errNoBTF, err)
	}
	read := cache.Kernel
	if r.Sys != kernel.Default().Sys {
		read = func() (*btf.Spec, error) { return btf.LoadSpec(name) }
	}
	spec, err := read()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoBTF, err)
	}
	return spec, nil
}

// has reports whether a struct of the kernel has a member.
func has(spec *btf.Spec, name, member string) (bool, error) {
	var s *btf.Struct
	if err := spec.TypeByName(name, &s); err != nil {
		return false, fmt.Errorf("type %s: %w", name, err)
	}
	return slices.ContainsFunc(s.Members, func(m btf.Member) bool { return m.Name == member }), nil
}

func throttled(spec *btf.Spec) (bool, error) {
	apart, err := has(spec, "task_struct", "sched_throttle_work")
	return err == nil && !apart, err
}

func throttling(spec *btf.Spec) answer {
	yes, err := throttled(spec)
	if err != nil {
		return unavailable(reason(err), "")
	}
	if !yes {
		return degraded("this kernel charges its threads to their cgroup but does not stop them at its quota", "none is needed: weights in proportion to the quotas hold them instead").
			with("task_struct has sched_throttle_work")
	}
	return full("kernel threads are stopped at the quota of their cgroup, as tasks are")
}

// SoftirqsChargeTasks reports whether a softirq's CPU time counts for the task that it interrupts.
// A kernel with CONFIG_IRQ_TIME_ACCOUNTING subtracts it from that task's clock
// (kernel/sched/core.c, update_rq_clock_task), unless it was booted with tsc=noirqtime;
// prev_irq_time in the run queue identifies such a kernel. A kernel that gave this up later,
// because its TSC turned out to be unstable, looks the same: for it the function returns false too.
// Error: no BTF.
func SoftirqsChargeTasks(r kernel.Roots) (yes bool, err error) {
	apart, err := ask(r, irqTime)
	return err == nil && (!apart || noIRQTime(r)), err
}

// irqTime reports whether the kernel is built to account interrupt time separately.
func irqTime(spec *btf.Spec) (bool, error) {
	return has(spec, "rq", "prev_irq_time")
}

// noIRQTime reports whether the kernel's command line disables that: arch/x86/kernel/tsc.c,
// tsc_setup.
func noIRQTime(r kernel.Roots) bool {
	line, _ := os.ReadFile(filepath.Join(r.Proc, "cmdline")) // unreadable: as if the option were not given
	return slices.ContainsFunc(strings.Fields(string(line)), func(s string) bool { return strings.HasPrefix(s, "tsc=noirqtime") })
}

func softirqCharge(r kernel.Roots, spec *btf.Spec) answer {
	apart, err := irqTime(spec)
	switch {
	case err != nil:
		return unavailable(reason(err), "")
	case apart && !noIRQTime(r):
		return degraded("this kernel charges the time of softirqs to nobody (CONFIG_IRQ_TIME_ACCOUNTING): a container that is robbed is not credited; one whose packets rob is charged all the same",
			"boot with tsc=noirqtime, or use a kernel without that option; doctor does not recognise a kernel that has given it up by itself, because its TSC is not stable").with("rq has prev_irq_time")
	case apart:
		return full("tsc=noirqtime: the time of a softirq counts for the task that it interrupts")
	}
	return full("the time of a softirq counts for the task that it interrupts")
}
