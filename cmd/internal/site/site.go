package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
)

//go:embed page.html
var layout string

// page is one document.
type page struct {
	name  string // of the file, below the root
	out   string // of the page
	Title string
	Body  template.HTML

	refers []string // other files below the root that it links to
}

// section is a list in the menu.
type section struct {
	Name  string
	Pages []entry
}

type entry struct {
	Title, Href string
	Here        bool
}

// build renders all documents to the folder to, and copies the files that they link to.
func build(root fs.FS, to string) error {
	tmpl, err := template.New("page").Parse(layout)
	if err != nil {
		return err
	}
	pages, err := read(root)
	if err != nil {
		return err
	}
	write := func(name string, data []byte) error {
		name = filepath.Join(to, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		return os.WriteFile(name, data, 0o644)
	}
	for _, p := range pages {
		var html bytes.Buffer
		err := tmpl.Execute(&html, struct {
			page
			Menu []section
		}{p, menu(pages, p)})
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		if err := write(p.out, html.Bytes()); err != nil {
			return err
		}
		for _, name := range p.refers {
			data, err := fs.ReadFile(root, name)
			if err != nil {
				return fmt.Errorf("%s links to %w", p.name, err)
			}
			if err := write(name, data); err != nil {
				return err
			}
		}
	}
	return nil
}

// read finds and renders the documents, in the order of their names.
func read(root fs.FS) (pages []page, err error) {
	err = fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "build" || d.Name() == "testdata"):
			return fs.SkipDir
		case path.Ext(name) != ".md" || strings.HasSuffix(name, "_TEMPLATE.md"):
			return nil
		}
		source, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		p, err := render(root, name, source)
		pages = append(pages, p)
		return err
	})
	return pages, err
}

// outOf is the page of a document.
func outOf(name string) string {
	if name == "README.md" {
		return "index.html"
	}
	return strings.TrimSuffix(name, ".md") + ".html"
}

func render(root fs.FS, name string, source []byte) (page, error) {
	p := page{name: name, out: outOf(name), Title: name}
	md := goldmark.New(goldmark.WithExtensions(extension.Table), goldmark.WithParserOptions(parser.WithAutoHeadingID()))
	doc := md.Parser().Parse(text.NewReader(source))
	err := ast.Walk(doc, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.Heading:
			if n.Level == 1 && p.Title == name {
				p.Title = plain(n, source)
			}
		case *ast.Link:
			n.Destination = []byte(p.link(root, string(n.Destination)))
		}
		return ast.WalkContinue, nil
	})
	if err != nil {
		return p, err
	}
	var html bytes.Buffer
	err = md.Renderer().Render(&html, source, doc)
	p.Body = template.HTML(html.String()) // goldmark leaves raw HTML out
	return p, err
}

// plain is the text of a node, without its marks.
func plain(n ast.Node, source []byte) string {
	var s strings.Builder
	for c := n.FirstChild(); c != nil; c = c.NextSibling() {
		if t, ok := c.(*ast.Text); ok {
			s.Write(t.Value(source))
		} else {
			s.WriteString(plain(c, source))
		}
	}
	return s.String()
}

// link is a link's target in the site: a document's page, or the file itself, which p then refers to.
func (p *page) link(root fs.FS, to string) string {
	file, fragment, found := strings.Cut(to, "#")
	if file == "" || strings.Contains(file, ":") {
		return to
	}
	target := path.Join(path.Dir(p.name), file)
	if info, err := fs.Stat(root, target); err == nil && info.IsDir() {
		target = path.Join(target, "README.md")
	}
	if path.Ext(target) == ".md" {
		target = outOf(target)
	} else {
		p.refers = append(p.refers, target)
	}
	if found {
		fragment = "#" + fragment
	}
	return relative(p.out, target) + fragment
}

// relative is the path of a file as a link in a page.
func relative(from, to string) string {
	return strings.Repeat("../", strings.Count(from, "/")) + to
}

// menu lists the documents that people look for, as links of page p.
func menu(pages []page, p page) []section {
	list := []section{{Name: "Questions"}, {Name: "Guides"}, {Name: "Features"}, {Name: "Project"}}
	for _, q := range pages {
		at := 3
		switch dir, base := path.Split(q.name); {
		case dir == "docs/questions/":
			at = 0
		case dir == "docs/" && base != "ARCHITECTURE.md" && base != "WORDS.md" || dir == "packaging/" || dir == "examples/":
			at = 1
		case strings.HasPrefix(dir, "feature/"):
			if base != "README.md" {
				continue
			}
			at = 2
		case dir != "" && dir != "docs/":
			continue
		}
		list[at].Pages = append(list[at].Pages, entry{q.Title, relative(p.out, q.out), q.name == p.name})
	}
	return list
}
