package policy

import (
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/container"
)

// TestMatchImage: a pattern means the image, however it was written when the
// container was started.
func TestMatchImage(t *testing.T) {
	digest := "sha256:" + strings.Repeat("ab", 32)
	id := "4bb46517cac3"
	for _, c := range []struct {
		image string
		names []string
		yes   string
		no    string
	}{
		{image: "nginx",
			yes: "nginx nginx:* nginx:latest docker.io/library/nginx docker.io/library/nginx:latest docker.io/* */nginx:* n?inx *",
			no:  "nginx:1.* ngin library/nginx:1 quay.io/*"},
		{image: "nginx:1.25", yes: "nginx:* nginx:1.* docker.io/library/nginx:1.25 */nginx:*", no: "nginx nginx:latest docker.io/library/nginx"},
		{image: "docker.io/library/nginx:latest", yes: "nginx nginx:* docker.io/library/nginx:*", no: "nginx:1.*"},
		{image: "nginx@" + digest, yes: "nginx:* nginx@sha256:* docker.io/library/nginx@*", no: "nginx nginx:latest nginx:?*"},
		{image: "nginx:1.25@" + digest, yes: "nginx:1.* nginx@sha256:* docker.io/library/nginx:1.25", no: "nginx nginx:latest"},
		{image: "grafana/grafana", yes: "grafana/* grafana/grafana:latest docker.io/grafana/grafana:latest", no: "docker.io/library/*"},
		{image: "registry.example.com:5000/ours/web", yes: "registry.example.com:5000/ours/* *:latest registry.example.com:5000/ours/web:*", no: "docker.io/* ours/*"},
		{image: "localhost/web", yes: "localhost/web:latest", no: "docker.io/*"},
		// By id: the engine gives the names.
		{image: id, names: []string{"nginx:1.25", "nginx@" + digest}, yes: id + " 4bb* nginx:1.* nginx:* docker.io/library/nginx:1.25 nginx@*", no: "docker.io/library/" + id + ":latest *:latest"},
		{image: digest, names: []string{"nginx:1.25"}, yes: "sha256:* nginx:1.25", no: "docker.io/library/sha256:* *:latest"},
		{image: digest, yes: "sha256:* *", no: "docker.io/*"},
		{image: "Not A\x00Reference", yes: "Not* *", no: "docker.io/*"},
		{image: "", no: "* docker.io/*"},
	} {
		of := container.Container{ID: 1, Name: "x", Image: c.image, ImageNames: c.names}
		for want, list := range map[bool]string{true: c.yes, false: c.no} {
			for _, pattern := range strings.Fields(list) {
				p, problems := ParseFile("f.yaml", []byte("match: {image: '"+pattern+"'}\nset: {netcpu: isolate}\n"))
				if len(problems) > 0 {
					t.Fatal(problems)
				}
				targets, _ := p.Resolve([]container.Container{of})
				if got := targets[0].Settings.NetCPU == NetCPUIsolate; got != want {
					t.Errorf("image %q (%q): pattern %q matches: %v, want %v", c.image, c.names, pattern, got, want)
				}
			}
		}
	}
}

func FuzzImageNames(f *testing.F) {
	for _, s := range []string{"nginx", "nginx:1", "sha256:00", "a@sha256:" + strings.Repeat("0", 64), "\xff", "x/y:z/", ""} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, image, name string) {
		names := imageNames(container.Container{Image: image, ImageNames: []string{name}})
		if (image == "") != (len(names) == 0) || len(names) > 20 || image != "" && names[0] != image {
			t.Fatalf("%q, %q: %q", image, name, names)
		}
	})
}
