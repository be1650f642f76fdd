package packages

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/test/vm"
)

// elsewhere copies a folder with the sources to a clone that has an additional file, on a machine
// that differs in ways that must not matter.
const elsewhere = `git init -q .
git add .
git -c user.name=test -c user.email=test@example.org commit -qm 'All of it'
touch more
umask 077
export TZ=Asia/Tokyo GOMAXPROCS=1`

// TestRelease makes a release twice, from the sources alone and elsewhere, with separate caches,
// and compares the bytes. Then it examines the SBOM and the packages, and installs, uses and
// removes them in a separate root.
func TestRelease(t *testing.T) {
	if testkit.Scale(t, 0, 1) == 0 {
		testkit.Skip(t, "builds everything twice: only in the tier full")
	}
	testkit.NeedRoot(t)
	first, second := release(t, "a", ""), release(t, "another-and-longer-name", elsewhere)
	sums := read(t, filepath.Join(first, "SHA256SUMS"))
	testkit.Same(t, "two builds", sums, read(t, filepath.Join(second, "SHA256SUMS")))
	check := exec.Command("sh", "-ec", `ssh-keygen -Y verify -f ../signers -I releases -n fairlead-release -s SHA256SUMS.sig <SHA256SUMS
		sha256sum --check --quiet SHA256SUMS`)
	check.Dir = first
	output(t, check)
	for _, want := range []string{"_amd64.deb", "_arm64.deb", ".x86_64.rpm", ".aarch64.rpm", "_x86_64.apk", "_aarch64.apk", "-amd64.cdx.json", "-arm64.cdx.json", "-image.tar", "-" + api.Release + ".tgz"} {
		if !regexp.MustCompile(`(?m)  fairlead\S*` + regexp.QuoteMeta(want) + `$`).MatchString(sums) {
			t.Errorf("no %s in\n%s", want, sums)
		}
	}

	var bom struct {
		BOMFormat  string
		Components []struct{ Name, Version, PURL string }
	}
	must(t, json.Unmarshal([]byte(read(t, filepath.Join(first, "fairlead-"+api.Release+"-arm64.cdx.json"))), &bom))
	modules := map[string]bool{}
	for _, c := range bom.Components {
		modules[c.Name] = c.Version != "" && c.PURL != ""
	}
	if bom.BOMFormat != "CycloneDX" || !modules["github.com/cilium/ebpf"] || !modules["std"] || modules["github.com/cpuguy83/go-md2man/v2"] {
		t.Errorf("SBOM of format %q names %v", bom.BOMFormat, modules)
	}

	if _, err := exec.LookPath("rpm"); err != nil {
		testkit.Skip(t, "no rpm")
	}
	root, err := vm.System("bookworm", t.TempDir())
	if err != nil {
		testkit.Skip(t, "system cannot be had: "+strings.Join(strings.Fields(err.Error()), " "))
	}
	rpm(t, root, first)
	apk(t, root, first)
}

// release makes a release from a copy of the files that would be committed, in a folder and on a
// host with a given name, after running a script.
func release(t *testing.T, name, before string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	top, err := filepath.Abs("../..")
	must(t, err)
	must(t, os.Mkdir(dir, 0o755))
	copied := exec.Command("sh", "-c", `git ls-files -coz --exclude-standard | xargs -0 cp --parents -t "$0"`, dir)
	copied.Dir = top
	output(t, copied)
	// The tools are built once.
	output(t, exec.Command("make", "-C", top, "--no-print-directory", "release-tools"))
	output(t, exec.Command("sh", "-ec", `mkdir "$1/build"; cp -R "$0"/build/nfpm-* "$0"/build/cyclonedx-* "$1/build/"`, top, dir))
	key := filepath.Join(dir, "build/key")
	output(t, exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key))
	must(t, os.WriteFile(filepath.Join(dir, "build/signers"), []byte("releases "+read(t, key+".pub")), 0o600))
	build := exec.Command("unshare", "--uts", "sh", "-ec", "echo $0 >/proc/sys/kernel/hostname\n"+before+`
		make release "$@"`, name, "VERSION="+api.Release, "RELEASE_KEY="+key)
	build.Dir = dir
	build.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=1700000000", "GOCACHE="+t.TempDir(), "GOFLAGS=-buildvcs=auto")
	output(t, build)
	return filepath.Join(dir, "build/release")
}

// rpm installs the package for this machine with rpm's own scripts, and removes it.
func rpm(t *testing.T, root, from string) {
	t.Helper()
	do := func(args ...string) string {
		t.Helper()
		return output(t, exec.Command("rpm", append([]string{"--root", root, "--dbpath", "/var/lib/rpm"}, args...)...))
	}
	do("--initdb")
	do("--install", "--nodeps", one(t, from, "*.x86_64.rpm"))
	testkit.Same(t, "rpm: version", api.Release, do("--query", "--queryformat", "%{VERSION}", "fairlead"))
	do("--verify", "--nodeps", "fairlead")
	uses(t, root)
	do("--erase", "fairlead")
	gone(t, root)
}

// apk does by hand what the program apk does, which Debian lacks: it unpacks the package, and calls
// its scripts.
func apk(t *testing.T, root, from string) {
	t.Helper()
	script := func(name string) {
		t.Helper()
		output(t, exec.Command("chroot", root, "/."+name, api.Release))
	}
	output(t, exec.Command("tar", "--warning=no-unknown-keyword", "-xzf", one(t, from, "*_x86_64.apk"), "-C", root))
	if info := read(t, filepath.Join(root, ".PKGINFO")); !strings.Contains(info, "\npkgver = "+api.Release+"\n") || regexp.MustCompile(`(?m)^[^=\n]+$`).MatchString(info) {
		t.Errorf(".PKGINFO:\n%s", info)
	}
	script("post-install")
	uses(t, root)
	script("pre-deinstall")
}

// uses runs the package's program in root, and checks what else there is.
func uses(t *testing.T, root string) {
	t.Helper()
	if got := output(t, exec.Command("chroot", root, "fairlead", "version")); !strings.HasPrefix(got, "fairlead "+api.Release+",") {
		t.Errorf("fairlead version: %s", got)
	}
	output(t, exec.Command("chroot", root, "fairlead", "policy", "check", "net.ceil=1mbit"))
	output(t, exec.Command("chroot", root, "getent", "group", "fairlead"))
	for _, name := range []string{
		"usr/lib/systemd/system/fairlead.service", "usr/lib/systemd/system/fairlead-restore.service", "etc/fairlead/policy.d",
		"usr/share/man/man1/fairlead-agent.1.gz", "usr/share/bash-completion/completions/fairlead", "usr/share/zsh/site-functions/_fairlead",
		"usr/share/fish/vendor_completions.d/fairlead.fish", "usr/share/doc/fairlead/README.md", "usr/share/doc/fairlead/LICENSE",
	} {
		testkit.Check(t, testkit.Err(os.Stat(filepath.Join(root, name))))
	}
	if unit := read(t, filepath.Join(root, "usr/lib/systemd/system/fairlead.service")); !strings.Contains(unit, "ExecStart=/usr/bin/fairlead agent\n") {
		t.Errorf("unit:\n%s", unit)
	}
}

// gone checks that the package's files have been removed.
func gone(t *testing.T, root string) {
	t.Helper()
	for _, name := range []string{"usr/bin/fairlead", "usr/lib/systemd/system/fairlead.service", "usr/share/man/man1/fairlead.1.gz", "etc/fairlead"} {
		if _, err := os.Stat(filepath.Join(root, name)); err == nil {
			t.Errorf("%s is left", name)
		}
	}
}

func one(t *testing.T, dir, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(found) != 1 {
		t.Fatalf("%s: %q, %v", pattern, found, err)
	}
	return found[0]
}

func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(name)
	must(t, err)
	return string(data)
}

func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%q: %v\n%s", cmd.Args, err, out)
	}
	return string(out)
}
