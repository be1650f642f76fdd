package kubernetes

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
)

// Image writes an image for [Node.Import], as `docker save` does: a static busybox with all its
// applets, which sleeps unless it is told what to do, and files of this machine, by their paths in
// the image.
func Image(w io.Writer, name string, files map[string]string) error {
	layer, err := layer(files)
	if err != nil {
		return fmt.Errorf("image %s: %w", name, err)
	}
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"Env": []string{"PATH=/bin"}, "Cmd": []string{"sleep", "1000000"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	for _, f := range []struct {
		name    string
		content []byte
	}{{"config.json", config}, {"layer.tar", layer}, {"manifest.json", manifest}} {
		if err := add(t, f.name, 0o644, f.content); err != nil {
			return err
		}
	}
	return t.Close()
}

func layer(files map[string]string) ([]byte, error) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return nil, err
	}
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list the applets of busybox: %w", err)
	}
	all := map[string]string{"bin/busybox": busybox}
	for to, from := range files {
		all[strings.TrimPrefix(to, "/")] = from
	}
	var b bytes.Buffer
	t := tar.NewWriter(&b)
	for _, to := range slices.Sorted(maps.Keys(all)) {
		content, err := os.ReadFile(all[to])
		if err == nil {
			err = add(t, to, 0o755, content)
		}
		if err != nil {
			return nil, err
		}
	}
	for applet := range strings.FieldsSeq(string(applets)) {
		if applet == "busybox" {
			continue
		}
		if err := t.WriteHeader(&tar.Header{Name: path.Join("bin", applet), Linkname: "busybox", Typeflag: tar.TypeSymlink}); err != nil {
			return nil, err
		}
	}
	if err := t.WriteHeader(&tar.Header{Name: "tmp/", Mode: 0o1777, Typeflag: tar.TypeDir}); err != nil {
		return nil, err
	}
	if err := t.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

func add(t *tar.Writer, name string, mode int64, content []byte) error {
	if err := t.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(content)), Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	_, err := t.Write(content)
	return err
}
