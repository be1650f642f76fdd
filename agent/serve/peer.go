package serve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
)

// Peer is the process that connected, as the kernel recorded it at that moment. IDs are those in
// the agent's own namespaces; PID is 0 for a process that is not visible there.
type Peer struct {
	PID int
	UID int
	GID int
	// Groups are the supplementary groups.
	Groups []uint32
	// FD is a pidfd of the process, or -1. Same uses it to check that PID still means the
	// process that connected.
	FD int

	looks bool // came by the socket for those who may only look
}

// mayWrite reports whether the peer may change things: root, or a member of Group.
func (p Peer) mayWrite() bool {
	if p.UID == 0 {
		return true
	}
	gid, ok := GroupID(api.Group)
	return ok && (p.GID == gid || slices.Contains(p.Groups, uint32(gid)))
}

// Same reports whether PID still is the process that connected. Data read below /proc/PID count
// only if Same holds afterwards: PIDs are reused, and a container could arrange for a process of
// another container to take its PID.
func (p Peer) Same() bool {
	if p.FD < 0 {
		return false
	}
	// EPERM: without CAP_KILL we may not signal the process, but it exists.
	err := unix.PidfdSendSignal(p.FD, 0, nil, 0)
	return err == nil || errors.Is(err, unix.EPERM)
}

// peerOf asks the kernel for the process at the other end. The caller closes FD.
func peerOf(c net.Conn) (Peer, error) {
	p := Peer{FD: -1}
	var inner error
	err := control(c, func(fd int) {
		cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			inner = err
			return
		}
		p.PID, p.UID, p.GID = int(cred.Pid), int(cred.Uid), int(cred.Gid)
		p.Groups = peerGroups(fd)
		p.FD = peerPidfd(fd, p.PID)
	})
	if err = errors.Join(err, inner); err != nil {
		return p, fmt.Errorf("read peer: %w", err)
	}
	return p, nil
}

// control calls fn with the descriptor of a unix socket.
func control(c net.Conn, fn func(fd int)) error {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return errors.New("not a unix socket")
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) { fn(int(fd)) })
}

// peerPidfd returns a pidfd of the process that connected. Kernels before 6.5 do not provide it.
// There it opens one from the PID, so another process could take the PID between connect and
// accept.
func peerPidfd(fd, pid int) int {
	const soPeerPidfd = 77
	if pfd, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, soPeerPidfd); err == nil {
		return pfd
	} else if !errors.Is(err, unix.ENOPROTOOPT) || pid == 0 {
		return -1
	}
	pfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1
	}
	return pfd
}

// peerGroups returns the supplementary groups, or none on any error, which can only take rights
// away.
func peerGroups(fd int) []uint32 {
	for n := uint32(32); ; {
		buf, size := make([]uint32, n), n*4
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&size)), 0)
		if errno == unix.ERANGE && size/4 > n {
			n = size / 4
			continue
		}
		if errno != 0 {
			return nil
		}
		return buf[:size/4]
	}
}

// peerKey is the key of the *visitor in a request's context.
type peerKey struct{}

// visitor reads the Peer of one connection, once, and closes its pidfd with the connection.
type visitor struct {
	net.Conn
	peer  Peer
	err   error
	guest *guest // nil on the agent's socket
	close sync.Once
	leave func()
}

func (v *visitor) Close() error {
	v.close.Do(func() {
		if v.peer.FD >= 0 {
			unix.Close(v.peer.FD)
		}
		v.leave()
	})
	return v.Conn.Close()
}

// visitors makes each accepted connection a *visitor, and limits how many there are at a time.
type visitors struct {
	net.Listener
	places chan struct{}
	guests *guests // nil on a socket without limits per container
	looks  bool    // those who connect may only look
}

func (l visitors) Accept() (net.Conn, error) {
	for {
		l.places <- struct{}{} // further connections wait in the kernel's queue
		if l.guests != nil {
			time.Sleep(l.guests.wait(time.Now()))
		}
		c, err := l.Listener.Accept()
		if err != nil {
			<-l.places
			return nil, err
		}
		// So a loop of connections that are closed at once costs next to nothing.
		if l.guests != nil && hungUp(c) {
			c.Close()
			<-l.places
			continue
		}
		v := &visitor{Conn: c, leave: func() { <-l.places }}
		v.peer, v.err = peerOf(c)
		v.peer.looks = l.looks
		if l.guests == nil || l.guests.admit(v) {
			return v, nil
		}
		v.Close()
	}
}

// hungUp reports whether the other end of a connection has been closed.
func hungUp(c net.Conn) bool {
	poll := []unix.PollFd{{}}
	err := control(c, func(fd int) {
		poll[0].Fd = int32(fd)
		unix.Poll(poll, 0) // an error counts as not hung up
	})
	return err == nil && poll[0].Revents&unix.POLLHUP != 0
}

func withPeer(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, peerKey{}, c)
}

// peer returns the process that made ctx's request.
func peer(ctx context.Context) (Peer, error) {
	v, ok := ctx.Value(peerKey{}).(*visitor)
	if !ok {
		return Peer{FD: -1}, errors.New("read peer: unknown connection")
	}
	return v.peer, v.err
}
