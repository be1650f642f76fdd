package isolate

import (
	"os"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// held has the sysfs files of devices that poll for us: threaded, RPS and RFS. No event reports a
// change of them, Linux 6.1 keeps threads that no longer poll, and the journal has no entry for a file
// that was right before. The files stay open: an open takes longer than all other work in a window.
type held map[journal.Ref]heldFile

type heldFile struct {
	*os.File
	by   journal.Owner
	want string
}

// hold starts to watch the files of a plan.
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

// changed returns the owners of files with an unwanted value. It closes files of devices that have gone.
func (h held) changed() (by []journal.Owner) {
	text := make([]byte, 4096) // the longest text in sysfs
	h.close(func(k heldFile) bool {
		n, _ := k.ReadAt(text, 0) // always io.EOF; n is 0 if the device has gone
		if strings.TrimSpace(string(text[:n])) != k.want {
			by = append(by, k.by)
		}
		return n == 0
	})
	return by
}

// close closes and forgets the files that match.
func (h held) close(which func(heldFile) bool) {
	for ref, k := range h {
		if which(k) {
			k.Close()
			delete(h, ref)
		}
	}
}
