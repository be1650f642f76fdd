package main

import (
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"
)

var (
	ids  = regexp.MustCompile(`\bid="([^"]+)"`)
	refs = regexp.MustCompile(`\b(?:href|src)="([^"]+)"`)
)

// TestSite builds the site of this tree: each link leads to a file, and to a heading in it, and
// nothing is loaded from elsewhere.
func TestSite(t *testing.T) {
	dir := t.TempDir()
	if err := build(os.DirFS("../../.."), dir); err != nil {
		t.Fatal(err)
	}
	site := os.DirFS(dir)
	headings, pages := map[string]bool{}, map[string]string{}
	err := fs.WalkDir(site, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || path.Ext(name) != ".html" {
			return err
		}
		data, err := fs.ReadFile(site, name)
		pages[name] = string(data)
		for _, m := range ids.FindAllStringSubmatch(string(data), -1) {
			headings[name+"#"+m[1]] = true
		}
		return err
	})
	if err != nil || len(pages) < 20 {
		t.Fatalf("%d pages, %v", len(pages), err)
	}
	for name, html := range pages {
		if strings.Contains(html, "<script") || strings.Contains(html, " src=") {
			t.Errorf("%s has a script, or loads something", name)
		}
		for _, m := range refs.FindAllStringSubmatch(html, -1) {
			if strings.Contains(m[1], ":") {
				continue
			}
			file, fragment, found := strings.Cut(m[1], "#")
			target := name
			if file != "" {
				target = path.Join(path.Dir(name), file)
			}
			if _, err := fs.Stat(site, target); err != nil {
				t.Errorf("%s: the link %s leads nowhere", name, m[1])
			} else if found && !headings[target+"#"+fragment] {
				t.Errorf("%s: %s has no heading for the link %s", name, target, m[1])
			}
		}
	}
}

func TestBuild(t *testing.T) {
	dir := t.TempDir()
	err := build(fstest.MapFS{
		"README.md":                     {Data: []byte("# A `b` & c\n[q](docs/questions/who.md#it-is-x) [far](https://example.com/a.md)\n<script>alert(1)</script>\n")},
		"docs/questions/who.md":         {Data: []byte("# Who?\n## It is x\n[up](../../README.md) [unit](../../packaging/a.service) [dir](../../examples)\n")},
		"packaging/a.service":           {Data: []byte("[Unit]\n")},
		"examples/README.md":            {Data: []byte("no title\n")},
		"build/x.md":                    {Data: []byte("# Left out\n")},
		"docs/PULL_REQUEST_TEMPLATE.md": {Data: []byte("# Left out\n")},
	}, dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]string{
		"index.html": {"<title>A b &amp; c</title>", `<a href="docs/questions/who.html#it-is-x">q</a>`, `<a href="https://example.com/a.md">`, `<a href="docs/questions/who.html">Who?</a>`},
		"docs/questions/who.html": {`<a href="../../index.html">up</a>`, `<a href="../../packaging/a.service">`, `<a href="../../examples/README.html">dir</a>`,
			`<h2 id="it-is-x">`, `<a href="../../docs/questions/who.html" aria-current="page">Who?</a>`},
		"packaging/a.service":  {"[Unit]"},
		"examples/README.html": {"<title>examples/README.md</title>"},
	} {
		data, err := os.ReadFile(path.Join(dir, name))
		if err != nil {
			t.Error(err)
		}
		for _, w := range want {
			if !strings.Contains(string(data), w) {
				t.Errorf("%s has no %s:\n%s", name, w, data)
			}
		}
		if strings.Contains(string(data), "alert") || strings.Contains(string(data), "Left out") {
			t.Errorf("%s:\n%s", name, data)
		}
	}
	for _, name := range []string{"build/x.html", "docs/PULL_REQUEST_TEMPLATE.html"} {
		if _, err := os.Stat(path.Join(dir, name)); err == nil {
			t.Errorf("%s was made", name)
		}
	}
	if err := build(fstest.MapFS{"a.md": {Data: []byte("[x](none.txt)\n")}}, t.TempDir()); err == nil {
		t.Error("a link to no file: no error")
	}
}
