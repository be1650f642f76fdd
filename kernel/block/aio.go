package block

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Load is a load on a file or device: reads or writes of one size at random offsets, with direct
// I/O.
type Load struct {
	Size  int  // bytes of a request, a multiple of 4096
	Write bool // else it reads
	Depth int  // requests in flight
	Idle  bool // I/O priority class idle: after all others, where the disk's scheduler honours it

	// Budget, if not 0, makes one thread for each request, and gives each thread this runtime
	// in every BudgetPeriod under SCHED_DEADLINE. It needs root.
	Budget time.Duration
}

// BudgetPeriod is the period of a Load's Budget.
const BudgetPeriod = 100 * time.Millisecond

// Done counts the requests and bytes that loads have completed.
type Done struct{ Requests, Bytes atomic.Uint64 }

// aligned is the strictest alignment that direct I/O can require.
const aligned = 4096

// Run puts a load on a file for the time over, and returns the requests completed per second. done,
// if it is not nil, counts them meanwhile. Run keeps Depth requests in flight by the kernel's
// asynchronous I/O (io_submit), which needs no thread for each. It makes a single request by pread
// and pwrite, as programs do. When ctx ends, Run ends within the time of one request. Errors: the
// error of ctx, and that of the first request that failed.
func (l Load) Run(ctx context.Context, file *os.File, over time.Duration, done *Done) (perSecond float64, err error) {
	if l.Size < aligned || l.Size%aligned != 0 || l.Depth < 1 {
		return 0, fmt.Errorf("load of %d requests of %d bytes at once", l.Depth, l.Size)
	}
	flags := os.O_RDONLY
	if l.Write {
		flags = os.O_RDWR
	}
	direct, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", file.Fd()), flags|unix.O_DIRECT, 0)
	if err != nil {
		return 0, fmt.Errorf("open %s past the page cache: %w", file.Name(), err)
	}
	defer direct.Close()
	length, err := direct.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, fmt.Errorf("length of %s: %w", file.Name(), err)
	}
	if length < int64(l.Size) {
		return 0, fmt.Errorf("%s is shorter than a request of %d bytes", file.Name(), l.Size)
	}
	if done == nil {
		done = &Done{}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// One thread must keep the disk busy if it can; several must where one cannot.
	const each = 16
	workers := min(runtime.NumCPU(), max(l.Depth/each, 1))
	if l.Budget > 0 {
		workers = l.Depth
		// A goroutine that blocks in the kernel keeps its P until Go's scheduler notices,
		// milliseconds later. With no more Ps than such goroutines, few requests are in
		// flight.
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), workers+1)))
	}
	before, start := done.Requests.Load(), time.Now()
	failed, ended := make([]error, workers), make([]time.Time, workers)
	var all sync.WaitGroup
	for i := range workers {
		depth := l.Depth / workers
		if i < l.Depth%workers {
			depth++
		}
		all.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and so does its priority
			failed[i] = l.keep(ctx, int(direct.Fd()), length, depth, start.Add(over), done, &ended[i])
			if failed[i] != nil {
				cancel()
			}
		})
	}
	all.Wait()
	for _, err := range failed {
		if err != nil && !errors.Is(err, context.Canceled) {
			return 0, fmt.Errorf("%s: %w", file.Name(), err)
		}
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	return float64(done.Requests.Load()-before) / slices.MaxFunc(ended, time.Time.Compare).Sub(start).Seconds(), nil
}

// iocb is struct iocb of the kernel (include/uapi/linux/aio_abi.h).
type iocb struct {
	data        uint64
	_, _        uint32 // aio_key and aio_rw_flags
	opcode      uint16
	_           int16 // aio_reqprio
	fd          uint32
	buf, nbytes uint64
	offset      int64
	_           uint64
	_, _        uint32 // aio_flags and aio_resfd
}

// event is struct io_event.
type event struct {
	data, obj uint64
	res, res2 int64
}

const (
	opPread  = 0 // IOCB_CMD_PREAD
	opPwrite = 1 // IOCB_CMD_PWRITE
)

// keep keeps requests in flight until end. It records when it counted the last of them, because it
// waits for the kernel beyond that.
func (l Load) keep(ctx context.Context, fd int, length int64, depth int, end time.Time, done *Done, ended *time.Time) (err error) {
	if l.Idle {
		const who, idle = 1, 3 << 13 // IOPRIO_WHO_PROCESS; IOPRIO_CLASS_IDLE above the data
		if _, _, errno := unix.Syscall(unix.SYS_IOPRIO_SET, who, 0, idle); errno != 0 {
			return fmt.Errorf("set the I/O priority: %w", errno)
		}
	}
	if l.Budget > 0 {
		if err := unix.SchedSetAttr(0, &unix.SchedAttr{
			Size: unix.SizeofSchedAttr, Policy: unix.SCHED_DEADLINE, Flags: unix.SCHED_FLAG_RESET_ON_FORK,
			Runtime: uint64(l.Budget), Deadline: uint64(BudgetPeriod), Period: uint64(BudgetPeriod),
		}, 0); err != nil {
			return fmt.Errorf("budget %v: %w", l.Budget, err)
		}
	}
	if depth == 1 {
		return l.one(ctx, fd, length, end, done, ended)
	}
	var queue uintptr
	if _, _, errno := unix.Syscall(unix.SYS_IO_SETUP, uintptr(depth), uintptr(unsafe.Pointer(&queue)), 0); errno != 0 {
		return fmt.Errorf("make a queue of asynchronous I/O (CONFIG_AIO, and room in fs.aio-max-nr): %w", errno)
	}
	// A mapping is page-aligned, which a Go slice is not.
	buffer, err := unix.Mmap(-1, 0, depth*l.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err == nil {
		defer unix.Munmap(buffer)
	}
	defer unix.Syscall(unix.SYS_IO_DESTROY, queue, 0, 0) // waits for requests in flight; runs before the buffer is unmapped
	if err != nil {
		return err
	}
	fill(buffer)
	requests, slots := make([]iocb, depth), make([]*iocb, depth)
	free := slots[:0]
	for i := range requests {
		requests[i] = iocb{data: uint64(i), fd: uint32(fd), opcode: opPread, buf: uint64(uintptr(unsafe.Pointer(&buffer[i*l.Size]))), nbytes: uint64(l.Size)}
		if l.Write {
			requests[i].opcode = opPwrite
		}
		free = append(free, &requests[i])
	}
	events := make([]event, depth)
	for ctx.Err() == nil && time.Now().Before(end) {
		for _, r := range free {
			r.offset = rand.Int64N(length/int64(l.Size)) * int64(l.Size)
		}
		for len(free) > 0 {
			n, _, errno := unix.Syscall(unix.SYS_IO_SUBMIT, queue, uintptr(len(free)), uintptr(unsafe.Pointer(&free[0])))
			if errno == unix.EAGAIN || errno == unix.EINTR {
				break // the disk's queue is full
			}
			if errno != 0 {
				return fmt.Errorf("submit requests: %w", errno)
			}
			free = free[n:]
		}
		free = slots[:copy(slots, free)]
		wait := unix.NsecToTimespec(int64(100 * time.Millisecond))
		n, _, errno := unix.Syscall6(unix.SYS_IO_GETEVENTS, queue, 1, uintptr(depth), uintptr(unsafe.Pointer(&events[0])), uintptr(unsafe.Pointer(&wait)), 0)
		if errno == unix.EINTR {
			n = 0
		} else if errno != 0 {
			return fmt.Errorf("wait for requests: %w", errno)
		}
		for _, e := range events[:n] {
			r := &requests[e.data]
			switch {
			case e.res < 0:
				return fmt.Errorf("request at %d: %w", r.offset, unix.Errno(-e.res))
			case e.res != int64(l.Size):
				return fmt.Errorf("request at %d: %d of %d bytes: %w", r.offset, e.res, l.Size, io.ErrUnexpectedEOF)
			}
			free = append(free, r)
		}
		done.Requests.Add(uint64(n))
		done.Bytes.Add(uint64(n) * uint64(l.Size))
	}
	*ended = time.Now()
	return ctx.Err()
}

// one keeps one request in flight.
func (l Load) one(ctx context.Context, fd int, length int64, end time.Time, done *Done, ended *time.Time) error {
	buffer, err := unix.Mmap(-1, 0, l.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	defer unix.Munmap(buffer)
	fill(buffer)
	call := unix.Pread
	if l.Write {
		call = unix.Pwrite
	}
	for ctx.Err() == nil && time.Now().Before(end) {
		at := rand.Int64N(length/int64(l.Size)) * int64(l.Size)
		switch n, err := call(fd, buffer, at); {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("request at %d: %w", at, err)
		case n != l.Size:
			return fmt.Errorf("request at %d: %d of %d bytes: %w", at, n, l.Size, io.ErrUnexpectedEOF)
		default:
			done.Requests.Add(1)
			done.Bytes.Add(uint64(n))
		}
	}
	*ended = time.Now()
	return ctx.Err()
}

// fill fills b with other bytes than zeros, because some disks do not store zeros.
func fill(b []byte) {
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
}
