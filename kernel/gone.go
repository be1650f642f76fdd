package kernel

import (
	"errors"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// gone lists the errors for an object that does not exist.
var gone = []error{journal.ErrGone, netdev.ErrNoLink, netdev.ErrNoNS, fs.ErrNotExist, unix.ENODEV, unix.ENXIO, unix.ESRCH}

// Gone reports whether an error means only that objects do not exist. A container that ends takes
// its devices, namespaces, cgroups and threads along at any moment, so this is an ordinary answer
// about one that is just ending.
func Gone(err error) bool {
	switch e := err.(type) {
	case nil:
		return false
	case interface{ Unwrap() []error }:
		all := e.Unwrap()
		return len(all) > 0 && !slices.ContainsFunc(all, func(err error) bool { return !Gone(err) })
	}
	if below := errors.Unwrap(err); below != nil {
		return Gone(below)
	}
	return slices.ContainsFunc(gone, func(g error) bool { return errors.Is(err, g) })
}
