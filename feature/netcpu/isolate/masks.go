package isolate

import (
	"os"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// masks are the knobs of RPS and RFS of all devices that poll for us. Nothing tells of a change, and the
// journal has no claim on a mask that was right before. Their files stay open, as opening one takes
// longer than all else that is done each second.
type masks map[journal.Ref]mask

type mask struct {
	*os.File
	by   journal.Owner
	want string
}

// hold follows the masks of a plan from now on.
func (m masks) hold(plan []journal.Setting, by journal.Owner) error {
	for _, s := range plan {
		if ref := s.Ref(); ref.Kind == netdev.KindRPS || ref.Kind == netdev.KindRFS {
			f, err := netdev.Hold(s.Knob)
			if err != nil {
				return err
			}
			m.close(func(was mask) bool { return was == m[ref] })
			m[ref] = mask{f, by, s.Value}
		}
	}
	return nil
}

// changed returns the owners of masks that are not as wanted. It forgets those of devices that have gone.
func (m masks) changed() (by []journal.Owner) {
	text := make([]byte, 4096) // what sysfs returns at most
	m.close(func(k mask) bool {
		n, _ := k.ReadAt(text, 0) // with io.EOF; of a device that has gone, with nothing
		if strings.TrimSpace(string(text[:n])) != k.want {
			by = append(by, k.by)
		}
		return n == 0
	})
	return by
}

// close forgets masks.
func (m masks) close(which func(mask) bool) {
	for ref, k := range m {
		if which(k) {
			k.Close()
			delete(m, ref)
		}
	}
}
