//go:build manual

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// main writes the man page of each verb, and the completions of shells, below the folder in its
// argument, as in /usr/share. It is a separate build, so that hosts do not carry the Markdown
// translator. The date on the pages is SOURCE_DATE_EPOCH.
func main() {
	root := program(verbs()).Root(cli.Env{Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv})
	if err := write(root, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(cli.Failed)
	}
}

func write(root *cobra.Command, dir string) error {
	file := func(name ...string) string { return filepath.Join(append([]string{dir}, name...)...) }
	man := file("man/man1")
	bash, zsh, fish := file("bash-completion/completions/fairlead"), file("zsh/site-functions/_fairlead"), file("fish/vendor_completions.d/fairlead.fish")
	for _, d := range []string{man, filepath.Dir(bash), filepath.Dir(zsh), filepath.Dir(fish)} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	root.DisableAutoGenTag = true
	literally(root)
	return errors.Join(
		doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "fairlead " + version, Manual: "fairlead"}, man),
		root.GenBashCompletionFileV2(bash, true),
		root.GenZshCompletionFile(zsh),
		root.GenFishCompletionFile(fish, true))
}

// indented matches the lines of a help that must not be filled.
var indented = regexp.MustCompile(`(?m)^  `)

// literally turns these lines into code, since the pages are made from Markdown.
func literally(cmd *cobra.Command) {
	cmd.Long = indented.ReplaceAllString(cmd.Long, "      ")
	for _, sub := range cmd.Commands() {
		literally(sub)
	}
}
