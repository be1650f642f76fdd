package load

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// mailFiles is how many files there are, as in the workload varmail of Filebench.
const mailFiles = 1000

// mail does what varmail of Filebench does: each of --conns removes a file, creates one and syncs
// it, appends to one and syncs it, and reads two whole files. Each of these is a unit.
func mail(o options, b *Board) error {
	for i := range mailFiles / 2 {
		if err := os.WriteFile(mailFile(o.to, i), make([]byte, o.size), 0o600); err != nil {
			return err
		}
	}
	b.setReady()
	failed := make(chan error, o.conns)
	for range o.conns {
		go func() { failed <- mailWorker(o, b) }()
	}
	return <-failed
}

func mailFile(dir string, i int) string { return filepath.Join(dir, strconv.Itoa(i)) }

func mailWorker(o options, b *Board) error {
	block := make([]byte, o.size)
	write := func(flags int) func(string) error {
		return func(name string) error {
			f, err := os.OpenFile(name, os.O_WRONLY|flags, 0o600)
			if err != nil {
				return err
			}
			_, err = f.Write(block)
			return errors.Join(err, f.Sync(), f.Close())
		}
	}
	read := func(name string) error { _, err := os.ReadFile(name); return err }
	for {
		for _, do := range []func(string) error{os.Remove, write(os.O_CREATE | os.O_TRUNC), write(os.O_APPEND), read, read} {
			for b.rate() == 0 {
				time.Sleep(time.Millisecond)
			}
			start := time.Now()
			err := do(mailFile(o.to, rand.IntN(mailFiles)))
			if errors.Is(err, fs.ErrNotExist) {
				continue // another worker removed it, or none has created it
			}
			if err != nil {
				return err
			}
			b.latency(time.Since(start))
			b.count(1, len(block))
		}
	}
}
