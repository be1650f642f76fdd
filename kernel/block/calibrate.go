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

// Figures are the rates of a disk, per second, each measured alone.
type Figures struct {
	Reads, Writes       uint64 // operations of SmallRequest at Depth
	Reads1, Writes1     uint64 // the same, one at a time
	BytesRead, BytesPut uint64 // bytes in requests of LargeRequest at bytesDepth
	Depth               int    // the queue depth with the highest rate
}

// The request sizes of a measurement, in bytes.
const (
	SmallRequest = 4 << 10
	LargeRequest = 128 << 10
)

// The queue depths. The depth of operations is raised for as long as that gains a twentieth.
const (
	smallDepth = 16
	mostDepth  = 256
	bytesDepth = 16
	worthwhile = 1.05
)

// Calibrate measures a disk, each figure for the time each. file is a scratch file on the disk or
// the device itself, and is overwritten. done counts the requests meanwhile. With idle, the
// requests have the I/O priority class idle, where the disk's scheduler honours it.
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
		// No disk transfers fewer bytes per second in large requests than in small ones,
		// but a measurement may show that.
		bytes := max(LargeRequest*run(LargeRequest, x.write, bytesDepth), SmallRequest*most)
		*x.one, *x.ops, *x.bytes, f.Depth = uint64(one), uint64(most), uint64(math.Ceil(bytes)), max(f.Depth, at)
	}
	return f, err
}

// Holding finds the disk that a directory is on. Errors: ErrNoDevice for a directory that is on no
// disk, such as in memory, or on a file system of several devices; ErrNoRequests.
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

// Scratch makes a file of mib MiB in a directory. It contains no zeros, because some disks do not
// store zeros. The file has no name, so it goes however the program ends. pace, if not 0, is how
// many MiB Scratch writes per second. done, if it is not nil, counts the bytes on the disk. The
// caller closes the file.
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
	const piece = 8 // MiB between two syncs: else the page cache writes all at once
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
