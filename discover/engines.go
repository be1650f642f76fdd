package discover

import (
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// Engine is the engine that made a container, according to its cgroup's name. Name is that of its
// source. User is its uid if it is rootless, else 0.
type Engine struct {
	Name string
	User int
}

// EngineOf returns the engine that made a cgroup; ok is false if the name is not of an engine. A
// user who may make cgroups can choose any name, so the result is good for advice only.
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

// engineScope matches an engine's name for the cgroup of a container, with and without systemd: a
// prefix, and the container's id.
var engineScope = regexp.MustCompile(`^(docker-|libpod-|crio-|cri-containerd-|nerdctl-|)([0-9a-f]{64})(\.scope)?$`)

// engineMonitor matches the cgroup of conmon, which monitors one container of Podman or CRI-O.
var engineMonitor = regexp.MustCompile(`^(libpod|crio)-conmon-[0-9a-f]{64}(\.scope)?$`)

// Engines counts the populated cgroups of engines in the v2 tree below root. It looks at no more
// than 8192 cgroups.
func Engines(proc, root string) (map[Engine]int, error) {
	layout, err := cgroup.Detect(proc, root)
	if err != nil {
		return nil, err
	}
	found, left := make(map[Engine]int), treeSize
	err = filepath.WalkDir(layout.V2, func(dir string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // the cgroup has gone
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
