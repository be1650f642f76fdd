// Command image makes the container image of fairlead from programs that `make package` has built:
//
//	image NAME LICENSE PROGRAM-amd64 PROGRAM-arm64 >ARCHIVE
//
// The archive is an OCI image layout with one index for both architectures, in a tar file. It has
// Docker's manifest.json too, so `ctr images import`, `podman load`, `skopeo copy oci-archive:` and
// `docker load` take it. Docker's form knows no index: there NAME is amd64, and NAME-arm64 arm64.
//
// An image has one layer with the program and its licence: no shell, no libraries, no certificates.
// All dates are SOURCE_DATE_EPOCH, so the same programs make the same bytes.
//
// It pushes nothing and starts nothing. The Makefile calls it (`make image`, `make release`). It is a
// module of its own, because nothing of what it needs is in the agent.
package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

func main() {
	if err := run(os.Args[1:], os.Getenv("SOURCE_DATE_EPOCH"), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(args []string, epoch string, to io.Writer) error {
	if len(args) != 4 {
		return fmt.Errorf("usage: image NAME LICENSE PROGRAM-amd64 PROGRAM-arm64 >ARCHIVE")
	}
	tag, err := name.NewTag(args[0], name.StrictValidation)
	if err != nil {
		return err
	}
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("read SOURCE_DATE_EPOCH: %w", err)
	}
	b := builder{tag: tag, license: args[1], date: time.Unix(seconds, 0).UTC()}
	for i, arch := range []string{"amd64", "arm64"} {
		if err := b.add(arch, args[2+i]); err != nil {
			return fmt.Errorf("image of %s: %w", arch, err)
		}
	}
	return b.write(to)
}

type builder struct {
	tag     name.Tag
	license string
	date    time.Time

	images []mutate.IndexAddendum
	docker []tarball.Descriptor
}

// add makes the image of one architecture.
func (b *builder) add(arch, program string) error {
	files, err := b.files(program)
	if err != nil {
		return err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(files)), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return err
	}
	platform := v1.Platform{OS: "linux", Architecture: arch}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err = mutate.ConfigFile(img, &v1.ConfigFile{
		OS: platform.OS, Architecture: platform.Architecture,
		Created: v1.Time{Time: b.date},
		RootFS:  v1.RootFS{Type: "layers"},
		Config: v1.Config{
			Entrypoint: []string{"/usr/bin/fairlead"},
			Cmd:        []string{"agent"},
			Env:        []string{"PATH=/usr/bin"},
			Labels: map[string]string{
				"org.opencontainers.image.title":    "fairlead",
				"org.opencontainers.image.source":   "https://github.com/fairlead-project/fairlead",
				"org.opencontainers.image.version":  b.tag.TagStr(),
				"org.opencontainers.image.licenses": "Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)",
			},
		},
	})
	if err != nil {
		return err
	}
	img, err = mutate.Append(img, mutate.Addendum{Layer: layer, History: v1.History{Created: v1.Time{Time: b.date}, CreatedBy: "make image"}})
	if err != nil {
		return err
	}
	b.images = append(b.images, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &platform}})
	return b.dockerEntry(img, arch)
}

// files is the content of the layer.
func (b *builder) files(program string) ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, f := range []struct {
		name, from string
		mode       int64
	}{
		{name: "usr/", mode: 0o755},
		{name: "usr/bin/", mode: 0o755},
		{name: "usr/bin/fairlead", from: program, mode: 0o755},
		{name: "usr/share/", mode: 0o755},
		{name: "usr/share/doc/", mode: 0o755},
		{name: "usr/share/doc/fairlead/", mode: 0o755},
		{name: "usr/share/doc/fairlead/LICENSE", from: b.license, mode: 0o644},
	} {
		var content []byte
		if f.from != "" {
			var err error
			if content, err = os.ReadFile(f.from); err != nil {
				return nil, err
			}
		}
		if err := b.entry(w, f.name, f.mode, content); err != nil {
			return nil, err
		}
	}
	return buf.Bytes(), w.Close()
}

// entry adds a file, or a directory where name ends in a slash.
func (b *builder) entry(w *tar.Writer, name string, mode int64, content []byte) error {
	h := &tar.Header{Name: name, Mode: mode, Size: int64(len(content)), ModTime: b.date, Format: tar.FormatPAX}
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err := w.Write(content)
	return err
}

// dockerEntry adds an image to manifest.json, with the places of its blobs in the layout.
func (b *builder) dockerEntry(img v1.Image, arch string) error {
	config, err := img.ConfigName()
	if err != nil {
		return err
	}
	d := tarball.Descriptor{Config: blob(config), RepoTags: []string{b.tag.Name()}}
	if arch != "amd64" {
		d.RepoTags[0] += "-" + arch
	}
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	for _, l := range layers {
		digest, err := l.Digest()
		if err != nil {
			return err
		}
		d.Layers = append(d.Layers, blob(digest))
	}
	b.docker = append(b.docker, d)
	return nil
}

func blob(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

// write writes the layout as a tar file.
func (b *builder) write(to io.Writer) error {
	dir, err := os.MkdirTemp("", "fairlead-image")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	at, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), b.images...)
	// Containerd takes the first as the name, others the second as the tag.
	err = at.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"io.containerd.image.name":          b.tag.Name(),
		"org.opencontainers.image.ref.name": b.tag.TagStr(),
	}))
	if err != nil {
		return err
	}
	docker, err := json.Marshal(b.docker)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "manifest.json"), docker, 0o644); err != nil {
		return err
	}
	out := bufio.NewWriter(to)
	w := tar.NewWriter(out)
	// WalkDir goes by name, so the order is always the same.
	err = filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if e.IsDir() {
			return b.entry(w, name+"/", 0o755, nil)
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return b.entry(w, name, 0o644, content)
	})
	if err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return out.Flush()
}
