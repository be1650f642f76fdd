package agent

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrTwo means that another agent works in this network namespace: the two would undo each other's
// qdiscs and offloads, whatever their state directories.
var ErrTwo = errors.New("another agent works in this network namespace")

// aloneSocket is the abstract unix socket of an agent. The kernel keeps such names per network
// namespace, and releases them with the process.
const aloneSocket = "@fairlead-agent"

// alone takes name in this network namespace until it is closed. Another process may take a name
// first: one that could not be an agent does not keep this one from working, but keeps the next
// from noticing it.
//
// Errors: ErrTwo.
func alone(name, proc string, log *slog.Logger) (io.Closer, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: name})
	if err == nil {
		return l, nil // nothing is accepted: the peer's credentials come without
	}
	if !errors.Is(err, unix.EADDRINUSE) {
		log.Warn("a second agent in this network namespace would not be noticed", "err", err)
		return io.NopCloser(nil), nil
	}
	peer, err := whoListens(name)
	if err == nil && works(peer, name, proc) {
		return nil, fmt.Errorf("%w: process %d", ErrTwo, peer.Pid)
	}
	log.Warn("a process that is no agent has the name by which agents notice each other; the agent goes on without it",
		"socket", name, "pid", peer.Pid, "uid", peer.Uid, "err", err)
	return io.NopCloser(nil), nil
}

// works reports whether the listener at name can be an agent.
func works(peer unix.Ucred, name, proc string) bool {
	return peer.Uid == 0 && rules(proc, int(peer.Pid)) && holds(proc, int(peer.Pid), name)
}

// whoListens returns the listener of a unix socket. It fails at once if its backlog is full.
func whoListens(name string) (unix.Ucred, error) {
	d := net.Dialer{Timeout: time.Second}
	c, err := d.Dial("unix", name)
	if err != nil {
		return unix.Ucred{}, err
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return unix.Ucred{}, err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cerr != nil {
		return unix.Ucred{}, cerr
	}
	if err != nil {
		return unix.Ucred{}, err
	}
	return *cred, nil
}

// holds reports whether a process has the socket with an abstract name. The credentials of a
// listener are those of the caller of listen: that process may have passed the socket on and ended,
// and its number may be another's by now.
func holds(proc string, pid int, name string) bool {
	f, err := os.Open(filepath.Join(proc, "net", "unix"))
	if err != nil {
		return false
	}
	defer f.Close()
	sockets := make(map[string]bool)
	for lines := bufio.NewScanner(f); lines.Scan(); {
		// Num RefCount Protocol Flags Type St Inode Path
		if fields := strings.Fields(lines.Text()); len(fields) == 8 && fields[7] == name {
			sockets["socket:["+fields[6]+"]"] = true
		}
	}
	dir := filepath.Join(proc, strconv.Itoa(pid), "fd")
	fds, _ := os.ReadDir(dir) // what was read before an error still counts
	for _, fd := range fds {
		if to, err := os.Readlink(filepath.Join(dir, fd.Name())); err == nil && sockets[to] {
			return true
		}
	}
	return false
}

// rules reports whether a process has what an agent needs to change the host, which root in a
// container lacks. Capabilities in a user namespace of its own, which any process can have, are none.
func rules(proc string, pid int) bool {
	dir := filepath.Join(proc, strconv.Itoa(pid))
	its, err1 := os.Readlink(filepath.Join(dir, "ns/user"))
	own, err2 := os.Readlink(filepath.Join(proc, "self/ns/user"))
	if err1 != nil || err2 != nil || its != own {
		return false
	}
	f, err := os.Open(filepath.Join(dir, "status"))
	if err != nil {
		return false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if hex, ok := strings.CutPrefix(lines.Text(), "CapEff:"); ok {
			caps, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
			const needed = 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_SYS_ADMIN
			return err == nil && caps&needed == needed
		}
	}
	return false
}
