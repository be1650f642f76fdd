package vm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Guest is one boot of a kernel, and its result.
type Guest struct {
	Kernel Kernel
	Root   Root
	Dir    string        // for its logs
	Limit  time.Duration // how long it may take

	fetched chan error    // one, when Root.Kernel is there or cannot be had
	ended   chan struct{} // closed when what follows is there

	result Result
	took   time.Duration
	err    error
}

func newGuest(k Kernel, dir string, limit time.Duration) *Guest {
	return &Guest{Kernel: k, Dir: dir, Limit: limit, fetched: make(chan error, 1), ended: make(chan struct{})}
}

// fetch brings the kernel to the cache.
func (g *Guest) fetch(cache string) {
	root, err := g.Kernel.Cached(cache)
	g.Root.Kernel = root
	g.fetched <- err
}

// bootAll boots the guests in order, several at once. A guest keeps one CPU busy, however many it
// has itself, and takes a gigabyte.
func bootAll(ctx context.Context, guests []*Guest, atOnce int) {
	next := make(chan *Guest)
	var wg sync.WaitGroup
	for range atOnce {
		wg.Go(func() {
			for g := range next {
				if g.err = <-g.fetched; g.err == nil {
					began := time.Now()
					g.err = g.boot(ctx)
					g.took = time.Since(began)
				}
				close(g.ended)
			}
		})
	}
	for _, g := range guests {
		next <- g
	}
	close(next)
	wg.Wait()
}

func (g *Guest) boot(ctx context.Context) (err error) {
	root, image := filepath.Join(g.Dir, "root"), filepath.Join(g.Dir, "initramfs")
	defer os.Remove(image) // a hundred megabytes
	defer os.RemoveAll(root)
	if err := errors.Join(os.RemoveAll(root), g.Root.Write(root, image)); err != nil {
		return err
	}
	disk := ""
	if g.Root.System != "" {
		disk = filepath.Join(g.Dir, "disk")
		defer os.Remove(disk)
		if err := execute("mkfs.ext4", "-q", "-d", g.Root.System, disk, "4G"); err != nil {
			return err
		}
	}
	g.result, err = Boot(ctx, g.Kernel.Arch, g.Root.Kernel, image, disk, g.Dir, g.Limit)
	return err
}
