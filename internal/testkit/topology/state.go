package topology

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// varies are numbers that the kernel chooses anew for the same object.
var varies = regexp.MustCompile(` (id|tag|jited|index|expires|refcnt|used|installed|firstused|direct_packets_stat) \S+`)

// minor is the class of a container, by its slot.
var minor = regexp.MustCompile(`666c:[0-9a-f]{1,3}\b`)

// Net describes what the network namespaces of boxes have: devices, qdiscs, classes, filters and
// programs.
func (h *Host) Net(boxes ...*sandbox.Box) string {
	h.T.Helper()
	var out strings.Builder
	for _, b := range boxes {
		testkit.Must(h.T, b.Do(func() error {
			links, err := netlink.LinkList()
			if err != nil {
				return err
			}
			script := "qdisc show\n"
			for _, l := range links {
				name := l.Attrs().Name
				script += fmt.Sprintf("class show dev %[1]s\nfilter show dev %[1]s\nfilter show dev %[1]s ingress\nfilter show dev %[1]s egress\n", name)
				for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress, ebpf.AttachXDP} {
					r, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: at})
					if err != nil {
						continue // a kernel without tcx
					}
					for _, p := range r.Programs {
						fmt.Fprintf(&out, "%s %s %s %v\n", b.Name, name, program(p.ID), at)
					}
				}
				fmt.Fprintf(&out, "%s %s %s %v %d %d\n", b.Name, name, l.Type(), l.Attrs().Flags, l.Attrs().TxQLen, l.Attrs().GSOMaxSize)
			}
			cmd := exec.Command("tc", "-force", "-batch", "-")
			cmd.Stdin = strings.NewReader(script)
			text, _ := cmd.Output() // it fails for devices without such a qdisc
			for line := range strings.Lines(string(text)) {
				line = minor.ReplaceAllString(varies.ReplaceAllString(line, ""), "666c:N")
				fmt.Fprintf(&out, "%s %s", b.Name, line)
			}
			return nil
		}))
	}
	lines := strings.SplitAfter(out.String(), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// Programs lists the links of the programs at a device of a box. A kernel without tcx has none.
func (h *Host) Programs(b *sandbox.Box, dev string, at ebpf.AttachType) (ids []link.ID) {
	h.T.Helper()
	index := h.Index(b, dev)
	testkit.Must(h.T, b.Do(func() error {
		all, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: at})
		if err != nil {
			return nil
		}
		for _, p := range all.Programs {
			id, _ := p.LinkID()
			ids = append(ids, id)
		}
		return nil
	}))
	return ids
}

// Detach does `bpftool link detach`.
func Detach(id link.ID) error {
	l, err := link.NewFromID(id)
	if err != nil {
		return err
	}
	defer l.Close()
	d, ok := l.(interface{ Detach() error })
	if !ok {
		return fmt.Errorf("a %T cannot be detached", l)
	}
	return d.Detach()
}

func program(id ebpf.ProgramID) string {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return err.Error()
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return err.Error()
	}
	return info.Name
}

// Knobs are the knobs that a journal has had entries for, while State was called.
type Knobs struct {
	Dir   string // of the journal
	known []journal.Entry
}

// State describes the entries of the journal, which another process may hold, for what exists, and
// all knobs with another value than before the first entry.
func (k *Knobs) State() (string, error) {
	dir, err := os.MkdirTemp("", "fltop-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	files, _ := filepath.Glob(filepath.Join(k.Dir, "journal-*")) // a good pattern
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, filepath.Base(f)), data, 0o600)
		}
		if err != nil {
			return "", err
		}
	}
	j, err := journal.Open(dir, "")
	if err != nil {
		return "", err
	}
	defer j.Close()
	var out []string
	open := kernel.Opener(kernel.Default())
	for _, e := range j.Entries() {
		if !slices.ContainsFunc(k.known, func(o journal.Entry) bool { return e.Ref == o.Ref }) {
			k.known = append(k.known, e)
		}
		if _, err := read(open, e.Ref); errors.Is(err, journal.ErrGone) {
			continue // with its object
		}
		out = append(out, fmt.Sprintf("entry %s %s of %s: %s", e.Ref.Kind, anyNumber.ReplaceAllString(e.Ref.Object, "N"), e.Owner.Feature, e.Value))
	}
	k.changed(open, func(e journal.Entry, value string, _ journal.Knob) {
		out = append(out, fmt.Sprintf("%s %s %s", e.Ref.Kind, anyNumber.ReplaceAllString(e.Ref.Object, "N"), value))
	})
	slices.Sort(out)
	return strings.Join(out, "\n"), nil
}

func read(open journal.Opener, ref journal.Ref) (string, error) {
	knob, err := open(ref)
	if err != nil {
		return "", err
	}
	if c, ok := knob.(io.Closer); ok {
		defer c.Close()
	}
	return knob.Read()
}

// Reset gives all knobs their first value, without the journal, and empties it.
func (k *Knobs) Reset() error {
	err := k.undo()
	if err != nil {
		// One may have to be undone before another: a veth without GRO has no NAPI that could cease to
		// be threaded.
		open := kernel.Opener(kernel.Default())
		for _, e := range k.known {
			k.with(open, e, func(knob journal.Knob) { knob.Write(e.Value) })
		}
		err = k.undo()
	}
	return errors.Join(err, os.RemoveAll(k.Dir))
}

// undo gives all knobs their first value, the last one first.
func (k *Knobs) undo() error {
	var errs []error
	slices.Reverse(k.known)
	k.changed(kernel.Opener(kernel.Default()), func(e journal.Entry, _ string, knob journal.Knob) { errs = append(errs, knob.Write(e.Before)) })
	slices.Reverse(k.known)
	return errors.Join(errs...)
}

// changed calls fn for the knobs that do not have their first value.
func (k *Knobs) changed(open journal.Opener, fn func(e journal.Entry, value string, knob journal.Knob)) {
	for _, e := range k.known {
		k.with(open, e, func(knob journal.Knob) {
			if value, err := knob.Read(); err == nil && value != e.Before {
				fn(e, value, knob)
			}
		})
	}
}

// with calls fn with the knob of an entry, unless that has gone.
func (k *Knobs) with(open journal.Opener, e journal.Entry, fn func(journal.Knob)) {
	knob, err := open(e.Ref)
	if err != nil {
		return
	}
	fn(knob)
	if c, ok := knob.(io.Closer); ok {
		c.Close()
	}
}

// anyNumber stands for an object that is made anew with another number.
var anyNumber = regexp.MustCompile(`[0-9]+`)

// Restore does what fairlead restore does: it undoes all entries of a journal.
func Restore(dir string) error {
	j, err := journal.Open(dir, "")
	if err != nil {
		return err
	}
	out, err := j.Restore(kernel.Opener(kernel.Default()), nil)
	return errors.Join(err, kernel.Tidy(kernel.Default(), out), j.Close())
}
