package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unicode"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// TestWithoutRoot runs without root what needs no root, and expects the rest to be refused.
func TestWithoutRoot(t *testing.T) {
	start := func(program string, args ...string) output {
		t.Helper()
		cmd := exec.Command(program, args...)
		cmd.Dir = "/"
		if os.Geteuid() == 0 {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		}
		return run(t, cmd, (*exec.Cmd).Start)
	}
	run := func(args ...string) output { return start(program, args...) }
	dir, err := os.MkdirTemp("/tmp", "fle2e-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755))
	good, bad := filepath.Join(dir, "good.yaml"), filepath.Join(dir, "bad.yaml")
	must(t, os.WriteFile(good, []byte(isolateAll), 0o644))
	must(t, os.WriteFile(bad, []byte("match: {name: x}\nset:\n  netcup: isolate\n"), 0o644))

	mustSay(t, run("version"), 0, "fairlead ", "Linux")
	mustSay(t, run("policy", "check", good), 0, "good, 1 policies")
	mustSay(t, run("policy", "check", bad), 1, "bad.yaml:3:3: netcup: unknown key")
	mustSay(t, run("agent", "--state-dir", filepath.Join(dir, "state"), "--socket", filepath.Join(dir, "sock")), 1, "needs root")
	mustSay(t, start(laboratory, "demo"), 1, "needs root")
	mustSay(t, start(laboratory, "bench", "netcpu", "--quick"), 1, "needs root")
	mustSay(t, run("ps", "--socket", filepath.Join(dir, "sock")), 1, "no agent answers", "systemctl status fairlead")
	mustSay(t, run("nonsense"), 2, "nonsense")

	o := run("doctor", "-o", "json")
	var report api.Report
	if err := json.Unmarshal([]byte(o.out), &report); err != nil || o.status != 1 {
		t.Fatalf("doctor: %v\n%v", err, o)
	}
	root := false
	for _, x := range report {
		if x.Level != api.LevelFull && x.Why == "" {
			t.Errorf("doctor gives no reason for %+v", x)
		}
		root = root || strings.Contains(x.Why+x.Mend, "root")
	}
	if !root {
		t.Errorf("doctor does not say that root is missing:\n%v", run("doctor"))
	}
	quiet(t, run("doctor"))
	mustSay(t, run("doctor"), 1, "nothing works here; what would help most: run the agent as root (")
}

// TestWithoutBTF hides the kernel's type information, as on kernels that are built without it.
func TestWithoutBTF(t *testing.T) {
	r := newRig(t)
	r.add(sandbox.Spec{Name: "e2e-box", CPU: sandbox.CPU{Quota: 20e6, Period: 100e6}})
	before := r.state()
	const hide = `mount -t tmpfs none /sys/kernel/btf && exec "$@"`
	blind := []string{"unshare", "--mount", "--propagation", "private", "sh", "-c", hide, "sh"}
	for _, dir := range []string{"/boot/vmlinux*", "/lib/modules/*/vmlinux*", "/usr/lib/debug/boot/vmlinux*"} {
		if found, _ := filepath.Glob(dir); len(found) > 0 {
			testkit.Skip(t, "type information of a kernel lies at "+found[0])
		}
	}
	argv := append(blind, program, "doctor")
	mustSay(t, run(t, exec.Command(argv[0], argv[1:]...), (*exec.Cmd).Start), 0, "btf", "BTF", "→")

	a := r.agent()
	a.policy("isolate.yaml", isolateAll)
	a.start(blind...)
	i := a.isolated("e2e-box", 1)
	st := a.status()
	if f := st.Features[0]; f.Support.Level != api.LevelDegraded || !strings.Contains(f.Support.Why, "BTF") && !strings.Contains(f.Support.Why, "btf") {
		t.Errorf("feature %+v, want it degraded for the lack of BTF", f)
	}
	mustSay(t, a.run("ps"), 0, "feature netcpu is degraded: ", "BTF")
	s := r.state()
	for k, want := range map[string]string{"e2e-box eth0 threaded": "1", "e2e-box eth0 napis": "1, 1 threads", "host h1 egress": "0 programs", "host nic0 threaded": "1"} {
		if s[k] != want {
			t.Errorf("%s: %q, want %q", k, s[k], want)
		}
	}
	r.reachable("without BTF")
	if c := a.stands("e2e-box", "netcpu", api.StateDone); c.ID != i.ID {
		t.Errorf("container %+v, was %+v", c, i.Container)
	}
	a.stop()
	r.sameAs(before, "after a clean stop")
}

// quiet fails the test if a text could drive a terminal.
func quiet(t *testing.T, o output) {
	t.Helper()
	for _, text := range []string{o.out, o.err} {
		for i, c := range text {
			if c != '\n' && !unicode.IsPrint(c) {
				t.Errorf("%q is printed, in %q", c, text[max(0, i-60):min(len(text), i+60)])
				return
			}
		}
	}
}
