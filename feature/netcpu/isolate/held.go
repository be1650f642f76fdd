package isolate

import (
	"os"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// held are the files in sysfs of all devices that poll for us: threads, RPS and RFS. Nothing tells of a
// change, Linux 6.1 keeps threads that no longer poll, and the journal has no claim on what was right
// before. They stay open, as opening one takes longer than all else that is done each second.
type held map[journal.Ref]heldFile

type heldFile struct {
	*os.File
	by   journal.Owner
	want string
}

// hold follows the files of a plan from now on.
func (h held) hold(plan []journal.Setting, by journal.Owner) error {
	for _, s := range plan {
		switch ref := s.Ref(); ref.Kind {
		case netdev.KindThreaded, netdev.KindRPS, netdev.KindRFS:
			f, err := netdev.Hold(s.Knob)
			if err != nil {
				return err
			}
			h.close(func(was heldFile) bool { return was == h[ref] })
			h[ref] = heldFile{f, by, s.Value}
		}
	}
	return nil
}

// changed returns the owners of what is not as wanted. It forgets the files of devices that have gone.
func (h held) changed() (by []journal.Owner) {
	text := make([]byte, 4096) // what sysfs returns at most
	h.close(func(k heldFile) bool {
		n, _ := k.ReadAt(text, 0) // with io.EOF; of a device that has gone, with nothing
		if strings.TrimSpace(string(text[:n])) != k.want {
			by = append(by, k.by)
		}
		return n == 0
	})
	return by
}

// close forgets files.
func (h held) close(which func(heldFile) bool) {
	for ref, k := range h {
		if which(k) {
			k.Close()
			delete(h, ref)
		}
	}
}
