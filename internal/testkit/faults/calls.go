package faults

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// How a call names its object.
const (
	byFD = iota
	byPath
	byNothing
)

// kind is one system call by which the product reaches the kernel.
type kind struct {
	name   string
	object int
	arg    int // with the descriptor, or with the path
	errors []unix.Errno
}

// calls are by number. What the Go runtime calls for itself is not here.
var calls = map[int]kind{
	unix.SYS_OPENAT:            {"openat", byPath, 1, []unix.Errno{unix.ENOENT, unix.EMFILE, unix.EPERM, unix.EINTR}},
	unix.SYS_OPENAT2:           {"openat2", byPath, 1, []unix.Errno{unix.ENOENT, unix.EMFILE, unix.EINTR}},
	unix.SYS_NEWFSTATAT:        {"newfstatat", byPath, 1, []unix.Errno{unix.ENOENT, unix.ENOMEM, unix.EINTR}},
	unix.SYS_STATX:             {"statx", byPath, 1, []unix.Errno{unix.ENOENT, unix.ENOMEM, unix.EINTR}},
	unix.SYS_FSTAT:             {"fstat", byFD, 0, []unix.Errno{unix.ENOMEM, unix.EINTR}},
	unix.SYS_FSTATFS:           {"fstatfs", byFD, 0, []unix.Errno{unix.ENOMEM, unix.EINTR}},
	unix.SYS_STATFS:            {"statfs", byPath, 0, []unix.Errno{unix.ENOENT, unix.ENOMEM, unix.EINTR}},
	unix.SYS_READLINKAT:        {"readlinkat", byPath, 1, []unix.Errno{unix.ENOENT, unix.ESRCH, unix.ENOMEM, unix.EINTR}},
	unix.SYS_NAME_TO_HANDLE_AT: {"name_to_handle_at", byPath, 1, []unix.Errno{unix.ENOENT, unix.ENOMEM}},
	unix.SYS_GETDENTS64:        {"getdents64", byFD, 0, []unix.Errno{unix.ENOENT, unix.ENOMEM, unix.EINTR}},
	unix.SYS_READ:              {"read", byFD, 0, []unix.Errno{unix.ENODEV, unix.ESRCH, unix.ENOMEM, unix.EINTR}},
	unix.SYS_PREAD64:           {"pread64", byFD, 0, []unix.Errno{unix.ENODEV, unix.ESRCH, unix.ENOMEM, unix.EINTR}},
	unix.SYS_WRITE:             {"write", byFD, 0, []unix.Errno{unix.ENODEV, unix.EBUSY, unix.ENOSPC, unix.EPERM, unix.ESRCH, unix.EINTR}},
	unix.SYS_PWRITE64:          {"pwrite64", byFD, 0, []unix.Errno{unix.ENOSPC, unix.ENODEV, unix.EBUSY, unix.EINTR}},
	unix.SYS_FTRUNCATE:         {"ftruncate", byFD, 0, []unix.Errno{unix.ENOSPC, unix.EINTR}},
	unix.SYS_FSYNC:             {"fsync", byFD, 0, []unix.Errno{unix.ENOSPC, unix.EINTR}},
	unix.SYS_FLOCK:             {"flock", byFD, 0, []unix.Errno{unix.EINTR, unix.ENOMEM}},
	unix.SYS_MKDIRAT:           {"mkdirat", byPath, 1, []unix.Errno{unix.ENOSPC, unix.ENOENT, unix.EPERM, unix.EINTR}},
	unix.SYS_UNLINKAT:          {"unlinkat", byPath, 1, []unix.Errno{unix.EBUSY, unix.EPERM, unix.EINTR}},
	unix.SYS_RENAMEAT:          {"renameat", byPath, 3, []unix.Errno{unix.ENOSPC, unix.EPERM, unix.EINTR}},
	unix.SYS_RENAMEAT2:         {"renameat2", byPath, 3, []unix.Errno{unix.ENOSPC, unix.EPERM, unix.EINTR}},
	unix.SYS_LINKAT:            {"linkat", byPath, 3, []unix.Errno{unix.ENOSPC, unix.EINTR}},
	unix.SYS_MOUNT:             {"mount", byPath, 1, []unix.Errno{unix.EPERM, unix.ENOMEM}},
	unix.SYS_UMOUNT2:           {"umount2", byPath, 0, []unix.Errno{unix.EBUSY}},
	unix.SYS_MMAP:              {"mmap", byFD, 4, []unix.Errno{unix.ENOMEM, unix.EPERM}},
	unix.SYS_IOCTL:             {"ioctl", byFD, 0, []unix.Errno{unix.ENODEV, unix.EPERM, unix.ENOMEM, unix.EINTR}},
	unix.SYS_SOCKET:            {"socket", byNothing, 0, []unix.Errno{unix.EMFILE, unix.ENOMEM}},
	// Not bind and fcntl: after an error there the netlink library closes its descriptor twice, the
	// second time whatever has its number by then, or never (nl.getNetlinkSocket).
	unix.SYS_SETSOCKOPT:  {"setsockopt", byFD, 0, []unix.Errno{unix.ENOMEM, unix.EPERM}},
	unix.SYS_GETSOCKNAME: {"getsockname", byFD, 0, []unix.Errno{unix.ENOMEM}},
	// The kernel answers a request over netlink by a message; the library returns both alike.
	unix.SYS_SENDTO:            {"sendto", byFD, 0, []unix.Errno{unix.ENODEV, unix.ENOENT, unix.EBUSY, unix.EPERM, unix.ENOMEM, unix.EINTR}},
	unix.SYS_SENDMSG:           {"sendmsg", byFD, 0, []unix.Errno{unix.ENODEV, unix.ENOENT, unix.EBUSY, unix.EPERM, unix.ENOMEM, unix.EINTR}},
	unix.SYS_RECVFROM:          {"recvfrom", byFD, 0, []unix.Errno{unix.EINTR, unix.ENOBUFS}},
	unix.SYS_RECVMSG:           {"recvmsg", byFD, 0, []unix.Errno{unix.EINTR, unix.ENOBUFS}},
	unix.SYS_BPF:               {"bpf", byNothing, 0, []unix.Errno{unix.ENOMEM, unix.ENODEV, unix.EPERM, unix.ENOENT, unix.EBUSY, unix.ENOSPC}},
	unix.SYS_PERF_EVENT_OPEN:   {"perf_event_open", byNothing, 0, []unix.Errno{unix.EMFILE, unix.ENODEV, unix.EPERM}},
	unix.SYS_SETNS:             {"setns", byFD, 0, []unix.Errno{unix.EPERM, unix.ENOMEM}},
	unix.SYS_UNSHARE:           {"unshare", byNothing, 0, []unix.Errno{unix.ENOMEM, unix.ENOSPC}},
	unix.SYS_PIDFD_OPEN:        {"pidfd_open", byNothing, 0, []unix.Errno{unix.ESRCH, unix.EMFILE}},
	unix.SYS_SCHED_SETATTR:     {"sched_setattr", byNothing, 0, []unix.Errno{unix.ESRCH, unix.EBUSY, unix.EPERM}},
	unix.SYS_SCHED_GETATTR:     {"sched_getattr", byNothing, 0, []unix.Errno{unix.ESRCH}},
	unix.SYS_SCHED_SETAFFINITY: {"sched_setaffinity", byNothing, 0, []unix.Errno{unix.ESRCH, unix.EPERM}},
	unix.SYS_SETPRIORITY:       {"setpriority", byNothing, 0, []unix.Errno{unix.ESRCH, unix.EPERM}},
}

// bpfCommands is enum bpf_cmd.
var bpfCommands = strings.Fields(`MAP_CREATE MAP_LOOKUP_ELEM MAP_UPDATE_ELEM MAP_DELETE_ELEM MAP_GET_NEXT_KEY PROG_LOAD OBJ_PIN OBJ_GET
	PROG_ATTACH PROG_DETACH PROG_TEST_RUN PROG_GET_NEXT_ID MAP_GET_NEXT_ID PROG_GET_FD_BY_ID MAP_GET_FD_BY_ID OBJ_GET_INFO_BY_FD
	PROG_QUERY RAW_TRACEPOINT_OPEN BTF_LOAD BTF_GET_FD_BY_ID TASK_FD_QUERY MAP_LOOKUP_AND_DELETE_ELEM MAP_FREEZE BTF_GET_NEXT_ID
	MAP_LOOKUP_BATCH MAP_LOOKUP_AND_DELETE_BATCH MAP_UPDATE_BATCH MAP_DELETE_BATCH LINK_CREATE LINK_UPDATE LINK_GET_FD_BY_ID
	LINK_GET_NEXT_ID ENABLE_STATS ITER_CREATE LINK_DETACH PROG_BIND_MAP`)

// routeObjects are what messages of rtnetlink are about, from RTM_BASE, four types each.
var routeObjects = strings.Fields("LINK ADDR ROUTE NEIGH RULE QDISC TCLASS TFILTER ACTION")

// describe returns a call with its object. Calls of the runtime for itself are not ok.
func (s *supervisor) describe(n *notif) (c Call, ok bool) {
	k := calls[int(n.NR)]
	object := ""
	switch k.object {
	case byFD:
		object, _ = os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", s.pid, int32(n.Args[k.arg])))
		// The runtime's own: to wake a thread that waits for files.
		if strings.HasPrefix(object, "anon_inode:[event") {
			return c, false
		}
	case byPath:
		if object = s.text(uintptr(n.Args[k.arg])); object == "" {
			object, _ = os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", s.pid, int32(n.Args[0])))
		}
	case byNothing:
		if int(n.NR) == unix.SYS_BPF {
			object = bpfCommands[min(n.Args[0], uint64(len(bpfCommands)-1))]
		}
	}
	if int(n.NR) == unix.SYS_SENDTO {
		object += " " + s.message(uintptr(n.Args[1]))
	}
	errors := k.errors
	c.own = strings.HasPrefix(object, "/") && !strings.HasPrefix(object, "/proc") && !strings.HasPrefix(object, "/sys")
	if c.own {
		errors = slices.DeleteFunc(slices.Clone(errors), vanished) // files of the product's own do not go by themselves
	}
	if len(errors) == 0 {
		errors = []unix.Errno{unix.EIO}
	}
	c.Name, c.Errors = k.name+" "+object, errors
	c.At.Kind = number.ReplaceAllString(c.Name, "N")
	s.nth[c.At.Kind]++
	c.At.Nth = s.nth[c.At.Kind]
	return c, true
}

// message returns the type of a netlink message of the subject.
func (s *supervisor) message(at uintptr) string {
	head := s.memory(at, unix.NLMSG_HDRLEN)
	if len(head) < unix.NLMSG_HDRLEN {
		return ""
	}
	of := int(binary.NativeEndian.Uint16(head[4:])) - unix.RTM_BASE
	if of < 0 || of/4 >= len(routeObjects) {
		return "other"
	}
	return []string{"NEW", "DEL", "GET", "SET"}[of%4] + routeObjects[of/4]
}

// text reads a path of the subject.
func (s *supervisor) text(at uintptr) string {
	text, _, _ := bytes.Cut(s.memory(at, 256), []byte{0})
	return string(text)
}

// memory reads memory of the subject, not across the end of a page, behind which there may be nothing.
func (s *supervisor) memory(at, size uintptr) []byte {
	buf := make([]byte, min(size, 4096-at%4096))
	n, err := unix.ProcessVMReadv(s.pid, []unix.Iovec{{Base: &buf[0], Len: uint64(len(buf))}}, []unix.RemoteIovec{{Base: at, Len: len(buf)}}, 0)
	if err != nil {
		return nil
	}
	return buf[:n]
}
