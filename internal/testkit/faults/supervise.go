package faults

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// install hands the calls of the table to whoever reads the descriptor that it returns. It holds
// for all threads, and for good. waker is the runtime's own.
func install(waker int) (listener int, err error) {
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	jump := func(op uint16, k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | op | unix.BPF_K, K: k, Jt: yes, Jf: no}
	}
	ret := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET, K: k} }
	const args = 16 // offset in struct seccomp_data
	prog := []unix.SockFilter{load(0)}
	for nr := range calls {
		var those []unix.SockFilter
		switch nr {
		case unix.SYS_READ, unix.SYS_WRITE: // not the control, nor what is printed
			those = append(those, load(args), jump(unix.BPF_JEQ, uint32(waker), 2, 0), jump(unix.BPF_JGT, control, 0, 1))
		case unix.SYS_MMAP: // files; the rest is the runtime's
			those = append(those, load(args+8*4), jump(unix.BPF_JEQ, 0xffffffff, 1, 0))
		case unix.SYS_FCNTL:
			those = append(those, load(args+8), jump(unix.BPF_JEQ, unix.F_DUPFD_CLOEXEC, 0, 1))
		}
		those = append(those, ret(unix.SECCOMP_RET_USER_NOTIF), ret(unix.SECCOMP_RET_ALLOW))
		prog = append(append(prog, jump(unix.BPF_JEQ, uint32(nr), 0, uint8(len(those)))), those...)
	}
	prog = append(prog, ret(unix.SECCOMP_RET_ALLOW))
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_TSYNC | unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH |
		// Else a signal of the runtime's scheduler would have a call made, and counted, twice.
		unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&fprog)))
	if errno != 0 {
		return -1, fmt.Errorf("install a seccomp filter: %w", errno)
	}
	return int(fd), nil
}

// notif is struct seccomp_notif of linux/seccomp.h.
type notif struct {
	ID         uint64
	PID, Flags uint32
	NR         int32
	Arch       uint32
	IP         uint64
	Args       [6]uint64
}

// response is struct seccomp_notif_resp.
type response struct {
	ID    uint64
	Val   int64
	Error int32
	Flags uint32
}

// supervisor answers the calls of a subject.
type supervisor struct {
	pid       int
	fd        int
	cancel    func()        // asks the subject to end a context
	cancelled chan struct{} // it has
	done      chan struct{} // closed once the subject has ended

	mu    sync.Mutex
	armed bool
	fault Fault
	out   Outcome
	nth   map[string]int // calls so far by kind
	hung  uint64         // the call that hangs; 0: none
}

// supervise begins to answer.
func supervise(pid, listener int, cancel func()) (*supervisor, error) {
	proc, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(proc)
	fd, err := unix.PidfdGetfd(proc, listener, 0)
	if err != nil {
		return nil, fmt.Errorf("take the filter of process %d: %w", pid, err)
	}
	s := &supervisor{pid: pid, fd: fd, cancel: cancel, cancelled: make(chan struct{}, 1), done: make(chan struct{})}
	// ENOTTY before 6.6: then the answers are slower.
	unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SECCOMP_IOCTL_NOTIF_SET_FLAGS, unix.SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP)
	go s.run()
	return s, nil
}

func (s *supervisor) arm(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed, s.fault, s.out, s.nth = true, f, Outcome{}, make(map[string]int)
}

func (s *supervisor) disarm() Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed = false
	if s.hung != 0 {
		s.answer(s.hung, 0)
		s.hung = 0
	}
	return s.out
}

func (s *supervisor) run() {
	defer close(s.done)
	defer unix.Close(s.fd)
	for {
		poll := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		if poll[0].Revents&unix.POLLIN == 0 {
			if poll[0].Revents != 0 {
				return // POLLHUP: the subject and its children have ended
			}
			continue
		}
		var n notif
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s.fd), unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&n))); errno != 0 {
			continue // ENOENT: the call was interrupted
		}
		if errno := s.judge(&n); errno != hangs {
			s.answer(n.ID, errno)
		}
	}
}

// hangs is what judge returns for a call that is not answered before disarm.
const hangs = unix.Errno(4096)

// answer ends a call with an error, or lets it go on.
func (s *supervisor) answer(id uint64, errno unix.Errno) {
	r := response{ID: id, Flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
	if errno != 0 {
		r.Flags, r.Error = 0, -int32(errno)
	}
	unix.Syscall(unix.SYS_IOCTL, uintptr(s.fd), unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&r)))
}

// judge returns the error for a call; 0: it goes on.
func (s *supervisor) judge(n *notif) unix.Errno {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.armed {
		return 0
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", s.pid, n.PID)); err != nil {
		return 0 // a child, which has the filter, too
	}
	call, ok := s.describe(n)
	if !ok {
		return 0
	}
	s.out.Calls = append(s.out.Calls, call)
	if call.At != s.fault.At {
		return 0
	}
	s.out.Met = &call
	switch {
	case s.fault.Kill:
		unix.Kill(s.pid, unix.SIGKILL)
		return unix.EINTR
	case s.fault.Cancel, s.fault.Hang:
		s.cancel()
		select {
		case <-s.cancelled:
		case <-time.After(time.Second): // the call holds the runtime up
		}
		if s.fault.Hang {
			s.hung = n.ID
			return hangs
		}
		return 0
	}
	s.out.Errno = call.Errors[s.fault.Error%len(call.Errors)]
	return s.out.Errno
}
