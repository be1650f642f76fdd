package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/fairlead-project/fairlead/api"
)

// Peer is the process that connected, as the kernel recorded it at that moment. Its IDs belong to
// the agent's namespaces; PID is 0 for a process that is invisible there.
type Peer struct {
	PID int
	UID int
	GID int
	// Groups are the supplementary groups.
	Groups []uint32
	// FD is a pidfd of the process, or -1. Same uses it to check that PID still means the
	// process that connected.
	FD int

	looks bool // connected through the read-only socket
}

// mayWrite reports whether the peer may change things: root, or a member of Group.
func (p Peer) mayWrite() bool {
	if p.UID == 0 {
		return true
	}
	gid, ok := GroupID(api.Group)
	return ok && (p.GID == gid || slices.Contains(p.Groups, uint32(gid)))
}

// Same reports whether PID still is the process that connected. Data read below /proc/PID is valid
// only if Same returns true afterwards: PIDs are reused, and a container could make a process of
// another container take its PID.
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
// There it opens one by PID, so another process could take the PID between connect and accept.
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

// peerGroups returns the supplementary groups. It returns none on an error, which can only remove
// rights.
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

// visitors turns each accepted connection into a *visitor, and bounds their number.
type visitors struct {
	net.Listener
	places chan struct{}
	guests *guests // nil on a socket without limits per container
	looks  bool    // its connections are read-only
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
		// So a loop of connections that are closed at once costs almost nothing.
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

const (
	maxOfOne  = 8                     // limits the concurrent connections of one container
	selfPause = 10 * time.Millisecond // between two answers to one container

	// Identifying a caller costs CPU time. So all containers together may connect at this rate;
	// further connections wait in the kernel's queue.
	guestPause = time.Millisecond // between two connections, on average
	guestBurst = 256              // connections that need not wait
)

// guests are the containers that are connected to their socket. Each may have maxOfOne connections,
// from any number of processes. Further connections are closed before anything is read from them.
// Callers that belong to no known container count as one.
type guests struct {
	caller func(Peer) api.ID

	accepted *rate.Limiter // of connections

	mu   sync.Mutex
	of   map[api.ID]*guest
	log  *slog.Logger
	told time.Time // when the log last had a warning
}

func newGuests(caller func(Peer) api.ID, log *slog.Logger) *guests {
	return &guests{caller: caller, accepted: rate.NewLimiter(rate.Every(guestPause), guestBurst), of: make(map[api.ID]*guest), log: log}
}

// tellEvery limits how often the log warns that containers connect too often.
const tellEvery = time.Minute

// tell logs that connections wait or are refused. The caller holds mu.
func (g *guests) tell(now time.Time, what string, args ...any) {
	if g.told.IsZero() || now.Sub(g.told) >= tellEvery {
		g.told = now
		g.log.Warn("the socket for containers: "+what, args...)
	}
}

// wait returns how long the next connection has to wait before it is accepted.
func (g *guests) wait(now time.Time) time.Duration {
	wait := g.accepted.ReserveN(now, 1).DelayFrom(now)
	if wait > 0 {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.tell(now, "connections wait, as there are more than it takes", "most per second", int(time.Second/guestPause))
	}
	return wait
}

// guest is one connected container.
type guest struct {
	conns   int           // guarded by the mutex of guests
	answers *rate.Limiter // one per selfPause
}

// admit reports whether a visitor may enter, and counts it until it is closed.
func (g *guests) admit(v *visitor) bool {
	id := api.ID(0)
	if v.err == nil {
		id = g.caller(v.peer)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(g.of, func(_ api.ID, one *guest) bool { return one.conns == 0 && one.answers.TokensAt(now) >= 1 })
	one := g.of[id]
	if one == nil {
		one = &guest{answers: rate.NewLimiter(rate.Every(selfPause), 1)}
		g.of[id] = one
	}
	if one.conns == maxOfOne {
		g.tell(now, "connections of a container are refused, as it has too many", "container", id, "most", maxOfOne)
		return false
	}
	one.conns++
	left := v.leave
	v.guest, v.leave = one, func() {
		g.mu.Lock()
		one.conns--
		g.mu.Unlock()
		left()
	}
	return true
}

// turn waits until the container that made ctx's request may have its next answer. It returns the
// process that made the request.
func turn(ctx context.Context) (Peer, error) {
	v, ok := ctx.Value(peerKey{}).(*visitor)
	if !ok || v.guest == nil {
		return Peer{}, errors.New("read peer: unknown connection")
	}
	if err := v.guest.answers.Wait(ctx); err != nil {
		return Peer{}, err
	}
	return v.peer, v.err
}
