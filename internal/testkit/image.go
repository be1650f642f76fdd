package testkit

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"strings"
)

// Image returns an image in the format of `docker save`. It contains a static busybox with all its
// applets, which sleeps by default, and files of this machine, by their paths in the image. It
// needs a static busybox.
func Image(name string, files map[string]string) ([]byte, error) {
	layer, err := busyboxTar(files)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", name, err)
	}
	config, err1 := json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"Env": []string{"PATH=/bin"}, "Cmd": []string{"sleep", "100000"}, "Labels": map[string]string{"from": "image", "given": "image"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
	})
	manifest, err2 := json.Marshal([]map[string]any{{
		"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"},
	}})
	all, err3 := archive(
		entry{tar.Header{Name: "config.json", Mode: 0o644}, config},
		entry{tar.Header{Name: "layer.tar", Mode: 0o644}, layer},
		entry{tar.Header{Name: "manifest.json", Mode: 0o644}, manifest},
	)
	return all, errors.Join(err1, err2, err3)
}

// busyboxTar returns the root file system of our image: the host's static busybox with a link for
// each applet, and the files.
func busyboxTar(files map[string]string) ([]byte, error) {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return nil, err
	}
	applets, err := exec.Command(path, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list the applets of busybox: %w", err)
	}
	all := []entry{{tar.Header{Name: "etc/passwd", Mode: 0o644}, []byte("root:x:0:0:root:/:/bin/sh\n")}}
	for _, dir := range []string{"bin/", "etc/", "proc/", "sys/", "dev/", "tmp/", "run/"} {
		all = append(all, entry{tar.Header{Name: dir, Mode: 0o755}, nil})
	}
	programs := map[string]string{"bin/busybox": path}
	maps.Copy(programs, files)
	for to, from := range programs {
		content, err := os.ReadFile(from)
		if err != nil {
			return nil, err
		}
		all = append(all, entry{tar.Header{Name: to, Mode: 0o755}, content})
	}
	for _, name := range strings.Fields(string(applets)) {
		if name != "busybox" {
			all = append(all, entry{tar.Header{Name: "bin/" + name, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil})
		}
	}
	return archive(all...)
}

// entry is a part of an archive. Without a type it is a directory if its name ends in a slash, and
// a file otherwise.
type entry struct {
	tar.Header
	content []byte
}

func archive(entries ...entry) ([]byte, error) {
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	for _, e := range entries {
		e.Size = int64(len(e.content))
		if err := w.WriteHeader(&e.Header); err != nil {
			return nil, err
		}
		if _, err := w.Write(e.content); err != nil {
			return nil, err
		}
	}
	return data.Bytes(), w.Close()
}
