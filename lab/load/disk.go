package load

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
)

// disk reads and writes blocks of the file or device --to with O_DIRECT, --conns at a time. Blocks have
// --size bytes; with --also, every other block has --also bytes. Blocks are at random places, or in
// order with --sequential. A rate of 0 on the board pauses it.
func disk(o options, b *Board) error {
	if o.size%blockSize != 0 || o.also%blockSize != 0 {
		return fmt.Errorf("--size and --also must be multiples of %d: the page cache is not used", blockSize)
	}
	flags := unix.O_RDONLY
	if o.writes > 0 {
		flags = unix.O_RDWR
	}
	fd, err := unix.Open(o.to, flags|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: o.to, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: o.to, Err: err}
	}
	if o.writes > 0 && st.Mode&unix.S_IFMT == unix.S_IFBLK {
		// The device must not hold data. Several generators may write to it, so none claims it.
		r := kernel.Default()
		if err := block.Vacant(r.Proc, r.Sys, o.to); err != nil {
			return err
		}
	}
	length, err := unix.Seek(fd, 0, unix.SEEK_END)
	if err != nil {
		return fmt.Errorf("length of %s: %w", o.to, err)
	}
	if length < int64(max(o.size, o.also)) {
		return fmt.Errorf("%s is shorter than a block", o.to)
	}
	// A goroutine that blocks in the kernel keeps its P for milliseconds, until the Go scheduler
	// notices. If such goroutines had all Ps, few requests would be in flight.
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), o.conns+1))
	b.setReady()
	failed := make(chan error, o.conns)
	for range o.conns {
		go func() { failed <- diskWorker(o, b, fd, length) }()
	}
	return <-failed
}

// blockSize is the largest alignment that O_DIRECT needs.
const blockSize = 4096

func diskWorker(o options, b *Board, fd int, length int64) error {
	// A mapping is page-aligned; a Go slice is not.
	buffer, err := unix.Mmap(-1, 0, max(o.size, o.also), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	next := rand.Int64N(length) / blockSize * blockSize // for --sequential
	for done := 0; ; {
		if b.rate() == 0 || o.count > 0 && done == o.count {
			time.Sleep(time.Millisecond)
			continue
		}
		block, write := buffer[:o.size], rand.IntN(100) < o.writes
		if o.also > 0 && done%2 == 1 {
			block = buffer[:o.also]
		}
		size := int64(len(block))
		at, call := rand.Int64N(length/size)*size, unix.Pread
		if o.sequential == "all" || o.sequential == "reads" && !write {
			if next+size > length {
				next = 0
			}
			at, next = next, next+size
		}
		if write {
			call = unix.Pwrite
		}
		start := time.Now()
		n, err := call(fd, block, at)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("%s at %d: %w", o.to, at, err)
		default:
			b.latency(time.Since(start))
			b.count(1, n)
			done++
		}
	}
}

// mailFiles is the number of files, as in the workload varmail of Filebench.
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

// sqlite makes the program sqlite3 change a row in each transaction, with write-ahead logging and a
// sync at each commit.
func sqlite(o options, b *Board) error {
	cmd := exec.Command("sqlite3", filepath.Join(o.to, "db"))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	out, oerr := cmd.StdoutPipe()
	if err := errors.Join(err, oerr, cmd.Start()); err != nil {
		return err
	}
	answers := bufio.NewReader(out)
	ask := func(statements string) error {
		_, err := io.WriteString(in, statements)
		_, aerr := answers.ReadString('\n')
		return errors.Join(err, aerr)
	}
	if err := ask("pragma synchronous = full; create table t (n integer); insert into t values (0); pragma journal_mode = wal;\n"); err != nil {
		return err
	}
	b.setReady()
	for {
		start := time.Now()
		if err := ask("update t set n = n + 1 returning n;\n"); err != nil {
			return err
		}
		b.latency(time.Since(start))
		b.count(1, 0)
	}
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
