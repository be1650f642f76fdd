package vm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Kernel is a kernel that Debian offers.
type Kernel struct {
	Name  string // as it is called here: "6.1"
	Suite string // of the archive
	Arch  string // of the guest, in Debian's words, which are Go's

	// TooOld means that fairlead refuses it. Only the guest's own tests run there, and check that
	// fairlead says clearly what is missing.
	TooOld bool
	// Whole means that in the tier CI, too, all tests that depend on the kernel run.
	Whole bool
	// Slow means that it runs only in the tier Full, and only the tests with testkit.Smoke. The
	// same kernels run the others on this machine's CPU.
	Slow bool
}

// Kernels returns the kernels that the tests run on, oldest first.
func Kernels() []Kernel {
	return []Kernel{
		{Name: "5.10", Suite: "bullseye", Arch: "amd64", TooOld: true},
		{Name: "6.1", Suite: "bookworm", Arch: "amd64", Whole: true},
		{Name: "6.12", Suite: "bookworm-backports", Arch: "amd64"},
		{Name: "newest", Suite: "sid", Arch: "amd64", Whole: true},
		{Name: "arm64", Suite: "trixie", Arch: "arm64", Slow: true},
	}
}

// ErrNoKernel is returned, wrapped, if a kernel is not available: the machine knows no mirror of
// Debian, or the mirror no longer has such a suite.
var ErrNoKernel = errors.New("kernel cannot be had")

// numbered matches the packages that make up one version of the kernel.
var numbered = regexp.MustCompile(`\blinux-(?:image|binary|modules)-[0-9][^\s,(]*`)

// cacheDir is where kernels or systems are kept. It is outside the checkout, so that neither make
// clean nor a fresh clone causes another download.
func cacheDir(what string) (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a place for %s: %w", what, err)
	}
	return filepath.Join(dir, "fairlead", what), nil
}

// fresh is how long a kernel or system in the cache is used before a newer one is fetched.
const fresh = 30 * 24 * time.Hour

// Cached returns the root of the kernel below dir, and fetches it if it is missing or no longer
// fresh. If a newer one is not available, it uses the old one. Only one process at a time fetches
// to a dir.
func (k Kernel) Cached(dir string) (root string, err error) {
	unlock, err := lock(dir, k.Name)
	if err != nil {
		return "", err
	}
	defer unlock()
	kept, next := filepath.Join(dir, k.Name), filepath.Join(dir, k.Name+".new")
	root = filepath.Join(kept, "root")
	at, missing := os.Stat(root)
	if missing == nil && time.Since(at.ModTime()) < fresh {
		return root, nil
	}
	if err := k.Fetch(next); err != nil {
		if missing == nil && errors.Is(err, ErrNoKernel) {
			return root, nil
		}
		return "", err
	}
	if err := errors.Join(os.RemoveAll(kept), os.Rename(next, kept)); err != nil {
		return "", err
	}
	now := time.Now()
	return root, os.Chtimes(root, now, now) // dpkg-deb gives it the package's time
}

// lock makes dir, and waits until no other process changes the entry with this name in it.
func lock(dir, name string) (unlock func() error, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, name+".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f.Close, nil // and unlocks
}

// Fetch downloads the packages of a kernel to dir, replacing earlier ones, and unpacks them below
// dir/root. It installs nothing, and apt keeps its lists in dir: the machine's own sources are read
// only to find its mirror.
func (k Kernel) Fetch(dir string) error {
	root := filepath.Join(dir, "root")
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	a, err := newApt(dir, k.Suite, k.Arch)
	if err != nil {
		return err
	}
	packages, err := a.packages("linux-image-cloud-" + k.Arch)
	if err != nil {
		return err
	}
	if k.Arch != runtime.GOARCH {
		packages = append(packages, "busybox-static")
	}
	if _, err := a.run("apt-get", append([]string{"-q", "download"}, packages...)...); err != nil {
		return fmt.Errorf("%w: %w", ErrNoKernel, err)
	}
	debs, _ := filepath.Glob(filepath.Join(dir, "*.deb"))
	for _, deb := range debs {
		if _, err := a.run("dpkg-deb", "-x", deb, root); err != nil {
			return err
		}
		if err := os.Remove(deb); err != nil {
			return err
		}
	}
	return os.RemoveAll(filepath.Join(dir, "apt"))
}

// apt is a package manager with separate lists, sources and caches.
type apt struct{ dir, conf string }

// newApt makes an apt that knows one suite of this machine's mirror, for one architecture.
func newApt(dir, suite, arch string) (apt, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return apt{}, err
	}
	own := filepath.Join(dir, "apt")
	a := apt{dir: dir, conf: filepath.Join(own, "apt.conf")}
	mirror, err := mirror()
	if err != nil {
		return apt{}, fmt.Errorf("%w: %w", ErrNoKernel, err)
	}
	for _, d := range []string{"parts", "state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(own, d), 0o755); err != nil {
			return apt{}, err
		}
	}
	option := ""
	for _, keyring := range []string{"/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp"} {
		if _, err := os.Stat(keyring); err == nil {
			option = "[signed-by=" + keyring + "] "
			break
		}
	}
	conf := fmt.Sprintf(`Dir::Etc::SourceList "%[1]s/sources.list";
Dir::Etc::SourceParts "%[1]s/parts";
Dir::Etc::Preferences "%[1]s/preferences";
Dir::Etc::PreferencesParts "%[1]s/parts";
Dir::State "%[1]s/state";
Dir::State::status "%[1]s/status";
Dir::Cache "%[1]s/cache";
Acquire::Languages "none";
Acquire::PDiffs "false";
Acquire::Retries "3";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
APT::Architecture "%[2]s";
APT::Sandbox::User "root";
`, own, arch)
	for name, text := range map[string]string{
		"apt.conf":     conf,
		"status":       "",
		"sources.list": fmt.Sprintf("deb %s%s %s main\n", option, mirror, suite),
	} {
		if err := os.WriteFile(filepath.Join(own, name), []byte(text), 0o644); err != nil {
			return apt{}, err
		}
	}
	if _, err := a.run("apt-get", "-q", "update", "-o", "APT::Update::Error-Mode=any"); err != nil {
		return apt{}, fmt.Errorf("%w: %w", ErrNoKernel, err)
	}
	return a, nil
}

// mirror asks apt which mirror of Debian this machine uses. If apt's lists are empty, it fills them
// first.
func mirror() (string, error) {
	ask := func() string {
		out, _ := exec.Command("apt-get", "indextargets", "--format", "$(REPO_URI)",
			"Created-By: Packages", "Origin: Debian", "Label: Debian").Output()
		uri, _, _ := strings.Cut(string(out), "\n")
		return uri
	}
	if uri := ask(); uri != "" {
		return uri, nil
	}
	exec.Command("apt-get", "-qq", "update").Run() // the second attempt below reports errors
	if uri := ask(); uri != "" {
		return uri, nil
	}
	return "", errors.New("this machine uses no mirror of Debian")
}

// packages resolves a meta package to the packages that hold the kernel.
func (a apt) packages(meta string) ([]string, error) {
	out, err := a.run("apt-cache", "show", "--no-all-versions", meta)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoKernel, err)
	}
	image := numbered.FindString(field(out, "Depends"))
	if image == "" {
		return nil, fmt.Errorf("%w: %s depends on no image", ErrNoKernel, meta)
	}
	if out, err = a.run("apt-cache", "show", "--no-all-versions", image); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoKernel, err)
	}
	return append([]string{image}, numbered.FindAllString(field(out, "Depends"), -1)...), nil
}

// field finds a field of a package's description.
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+": "); ok {
			return value
		}
	}
	return ""
}

// run runs a program with the private configuration, in a.dir.
func (a apt) run(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = a.dir
	cmd.Env = append(os.Environ(), "APT_CONFIG="+a.conf, "LC_ALL=C")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, args[0], err, strings.TrimSpace(errs.String()))
	}
	return out.String(), nil
}
