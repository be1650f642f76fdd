package block

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Figures are what a disk does of each kind alone, in each second.
type Figures struct {
	Reads, Writes       uint64 // operations of SmallRequest with Depth at once
	Reads1, Writes1     uint64 // the same, one at a time
	BytesRead, BytesPut uint64 // in requests of LargeRequest, bytesDepth at once
	Depth               int    // requests at once that gave the most
}

// The sizes of requests that a disk is measured with, in bytes.
const (
	SmallRequest = 4 << 10
	LargeRequest = 128 << 10
)

// The numbers of requests at once. Operations are measured with more and more of them, as
// long as that gives a twentieth more.
const (
	smallDepth = 16
	mostDepth  = 256
	bytesDepth = 16
	worthwhile = 1.05
)

// Calibrate measures a disk at a file of its own, which is overwritten, or at the device
// itself, each figure for so long. done counts what it does meanwhile. With idle, requests
// come after all others where the disk's scheduler knows of that.
func Calibrate(ctx context.Context, file *os.File, each time.Duration, idle bool, done *Done) (f Figures, err error) {
	run := func(size int, write bool, depth int) float64 {
		if err != nil {
			return 0
		}
		var n float64
		if n, err = (Load{Size: size, Write: write, Depth: depth, Idle: idle}).Run(ctx, file, each, done); err == nil && n == 0 {
			err = fmt.Errorf("nothing was done in %v: it takes more time", each)
		}
		return n
	}
	for _, x := range []struct {
		write           bool
		one, ops, bytes *uint64
	}{{false, &f.Reads1, &f.Reads, &f.BytesRead}, {true, &f.Writes1, &f.Writes, &f.BytesPut}} {
		one := run(SmallRequest, x.write, 1)
		most, at := one, 1
		for depth := smallDepth; depth <= mostDepth && err == nil; depth *= 4 {
			n := run(SmallRequest, x.write, depth)
			if n < worthwhile*most && depth > smallDepth {
				break
			}
			if n > most {
				most, at = n, depth
			}
		}
		// No disk transfers fewer bytes per second in large requests than in small ones, but a
		// measurement may say so.
		bytes := max(LargeRequest*run(LargeRequest, x.write, bytesDepth), SmallRequest*most)
		*x.one, *x.ops, *x.bytes, f.Depth = uint64(one), uint64(most), uint64(math.Ceil(bytes)), max(f.Depth, at)
	}
	return f, err
}

// Holding finds the disk that a directory is on. Errors: ErrNoDevice for one that is on
// none, as in memory, or on a file system of several devices; ErrNoRequests.
func Holding(sys, dir string) (Disk, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return Disk{}, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	d, err := Find(sys, unix.Major(st.Dev), unix.Minor(st.Dev))
	if err != nil {
		return Disk{}, fmt.Errorf("disk of %s: %w", dir, err)
	}
	return d, nil
}

// Scratch makes a file of so many MiB in a directory, without zeros in it, because some
// disks do not store zeros. The file has no name, so that it goes however the program ends.
// With pace, it writes so many MiB in each second. done, if it is not nil, counts the bytes
// that the disk has. The caller closes the file.
func Scratch(ctx context.Context, dir string, mib, pace int64, done *Done) (file *os.File, err error) {
	if file, err = os.CreateTemp(dir, "fairlead-calibrate"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close())
		}
	}()
	if err := os.Remove(file.Name()); err != nil {
		return nil, err
	}
	block := make([]byte, 1<<20)
	fill(block)
	if done == nil {
		done = &Done{}
	}
	const piece = 8 // MiB, which are synced together: else the page cache writes all at once
	for left := mib; left > 0; left -= piece {
		n := min(left, piece)
		for range n {
			if _, err := file.Write(block); err != nil {
				return nil, err
			}
			if err := ctx.Err(); err != nil {
				return nil, err
			}
		}
		if pace > 0 {
			if err := file.Sync(); err != nil {
				return nil, err
			}
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(time.Duration(n) * time.Second / time.Duration(pace)):
			}
		}
		done.Bytes.Add(uint64(n) << 20)
	}
	return file, file.Sync()
}
