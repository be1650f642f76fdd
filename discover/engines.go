package discover

import (
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// Engine is the engine that made a container, by the name of its cgroup: Name is that of its
// source. User is its user if it runs without root, else 0.
type Engine struct {
	Name string
	User int
}

// EngineOf returns the engine that made a cgroup; ok is false if the name is not an engine's. A
// user who may make cgroups can choose such a name, so use it for advice only.
func EngineOf(dir string) (e Engine, ok bool) {
	parts := strings.Split(dir, "/")
	for i, part := range parts {
		if id, found := strings.CutPrefix(part, "user-"); found {
			if n, err := strconv.Atoi(strings.TrimSuffix(id, ".slice")); err == nil {
				e.User = n
			}
		}
		m := engineScope.FindStringSubmatch(part)
		if m == nil {
			continue
		}
		above := ""
		if i > 0 {
			above = parts[i-1]
		}
		switch by := m[1]; {
		case by == "docker-", by == "" && above == "docker":
			e.Name = "docker"
		case by == "libpod-":
			e.Name = "podman"
		case by == "crio-":
			e.Name = "cri-o"
		case by == "cri-containerd-", by == "nerdctl-", by == "" && strings.Contains(dir, "/kubepods"):
			e.Name = "containerd"
		default:
			continue
		}
		return e, true
	}
	return Engine{}, false
}

// engineScope matches an engine's name for a container's cgroup, with systemd and without: its prefix, and the
// container's id.
var engineScope = regexp.MustCompile(`^(docker-|libpod-|crio-|cri-containerd-|nerdctl-|)([0-9a-f]{64})(\.scope)?$`)

// engineMonitor matches the cgroup of conmon, with which Podman and CRI-O watch one container.
var engineMonitor = regexp.MustCompile(`^(libpod|crio)-conmon-[0-9a-f]{64}(\.scope)?$`)

// Engines counts the cgroups of engines with processes, in the v2 tree below root. It looks at 8192
// cgroups at most.
func Engines(proc, root string) (map[Engine]int, error) {
	layout, err := cgroup.Detect(proc, root)
	if err != nil {
		return nil, err
	}
	found, left := make(map[Engine]int), treeSize
	err = filepath.WalkDir(layout.V2, func(dir string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // it has ended
		}
		if left--; left < 0 {
			return filepath.SkipAll
		}
		e, ok := EngineOf(strings.TrimPrefix(dir, layout.V2))
		if !ok {
			return nil
		}
		if b, err := readSmall(filepath.Join(dir, "cgroup.events")); err == nil && strings.Contains(string(b), "populated 1") {
			found[e]++
		}
		return filepath.SkipDir
	})
	return found, err
}
