package vm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// System unpacks a small Debian of a suite, with systemd and these packages, to a new folder in
// dir, and returns that folder. It makes the system once and keeps it for a month. If it cannot,
// the error says why.
func System(suite, dir string, packages ...string) (root string, err error) {
	cache, err := cacheDir("systems")
	if err != nil {
		return "", err
	}
	name := strings.Join(append([]string{suite}, packages...), "+")
	unlock, err := lock(cache, name)
	if err != nil {
		return "", err
	}
	defer unlock()
	archive := filepath.Join(cache, name+".tar")
	if at, err := os.Stat(archive); err != nil || time.Since(at.ModTime()) > fresh {
		if err := makeSystem(suite, archive, packages); err != nil {
			return "", err
		}
	}
	root = filepath.Join(dir, suite)
	if err := os.Mkdir(root, 0o755); err != nil {
		return "", err
	}
	return root, execute("tar", "--numeric-owner", "-xpf", archive, "-C", root)
}

func makeSystem(suite, archive string, packages []string) error {
	from, err := mirror()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(archive), suite)
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	root, made := filepath.Join(dir, "root"), filepath.Join(dir, "tar")
	if err := execute("debootstrap", "--variant=minbase", "--include="+strings.Join(append([]string{"systemd", "systemd-sysv"}, packages...), ","), suite, root, from); err != nil {
		return err
	}
	// Devices cannot be unpacked everywhere, and the test mounts its own.
	if err := execute("tar", "--numeric-owner", "--exclude=./dev/*", "--exclude=./proc/*", "--exclude=./sys/*", "-cpf", made, "-C", root, "."); err != nil {
		return err
	}
	return os.Rename(made, archive)
}

func execute(name string, args ...string) error {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, tail(out, 3))
	}
	return nil
}
