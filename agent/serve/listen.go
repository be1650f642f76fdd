package serve

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// GroupID returns the number of a group, by its name or number, or false if the host does not have it.
func GroupID(name string) (int, bool) {
	if g, err := user.LookupGroup(name); err == nil {
		name = g.Gid
	}
	id, err := strconv.Atoi(name)
	return id, err == nil
}

// Listen makes the agent's socket: mode 0660, owned by Group where it exists. It replaces a socket
// that a dead agent left. A socket that an agent answers on is an error, and so is a file that is
// not a socket. Close removes the socket.
func Listen(path string) (net.Listener, error) {
	gid, ok := GroupID(api.Group)
	if !ok {
		gid = -1
	}
	return listen(path, 0o660, gid)
}

// ListenView makes the socket for those who may only look: mode 0660, owned by the group gid.
func ListenView(path string, gid int) (net.Listener, error) { return listen(path, 0o660, gid) }

// ListenSelf makes the socket for containers. Any process may connect, and sees only its own
// container.
func ListenSelf(path string) (net.Listener, error) { return listen(path, 0o666, -1) }

func listen(path string, mode fs.FileMode, gid int) (net.Listener, error) {
	if err := vacant(path); err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	// The socket gets its mode under another name, so that no client connects before.
	tmp := path + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	s := &socket{UnixListener: l, path: path, name: tmp}
	if err := s.show(mode, gid); err != nil {
		return nil, errors.Join(fmt.Errorf("listen at %s: %w", path, err), s.Close())
	}
	return s, nil
}

// vacant returns an error unless path is free.
func vacant(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("a file that is not a socket is there")
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		c.Close()
		return errors.New("another agent answers there")
	}
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("see whether another agent answers there: %w", err)
}

// socket is a unix socket that removes its name when it is closed, unless another process has taken
// the name meanwhile.
type socket struct {
	*net.UnixListener
	path string
	name string // its current path
	file fs.FileInfo
	once sync.Once
}

func (s *socket) show(mode fs.FileMode, gid int) error {
	if err := os.Chmod(s.name, mode); err != nil {
		return err
	}
	if gid >= 0 && os.Geteuid() == 0 {
		if err := os.Chown(s.name, -1, gid); err != nil {
			return err
		}
	}
	var err error
	if s.file, err = os.Lstat(s.name); err != nil {
		return err
	}
	if err := os.Rename(s.name, s.path); err != nil {
		return err
	}
	s.name = s.path
	return nil
}

// Close stops listening and removes the name.
func (s *socket) Close() error {
	s.once.Do(func() {
		if now, err := os.Lstat(s.name); err == nil && (s.file == nil || os.SameFile(now, s.file)) {
			os.Remove(s.name)
		}
	})
	return s.UnixListener.Close()
}
