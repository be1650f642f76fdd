// Command site makes a static site of the documents: site ROOT TO renders each Markdown file below
// ROOT to HTML below TO. It is for make site, and no package has it. The site needs no network and
// no script.
package main

import (
	"fmt"
	"os"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: site ROOT TO")
		os.Exit(2)
	}
	if err := build(os.DirFS(os.Args[1]), os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "site:", err)
		os.Exit(1)
	}
}
