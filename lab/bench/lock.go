package bench

import (
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// ErrBusy means that another experiment runs on this machine. Two at once
// would measure each other.
var ErrBusy = errors.New("another experiment is under way on this machine")

// only locks out other experiments until release is called or the process ends. The lock is an
// abstract socket, which leaves nothing behind.
func only() (release func(), err error) {
	l, err := net.Listen("unix", "@fairlead-bench")
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, ErrBusy
	}
	if err != nil {
		return nil, fmt.Errorf("lock out other experiments: %w", err)
	}
	return func() { l.Close() }, nil
}
