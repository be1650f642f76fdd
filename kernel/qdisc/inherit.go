package qdisc

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Left describes a program that a process has attached by a link, for the process that follows it.
type Left struct {
	Link  link.ID `json:"link"`
	Stage Stage   `json:"stage"`
	Name  string  `json:"name"`
}

// Left lists the programs that are attached by links; by filters: none.
func (h *Hooks) Left() []Left {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := make([]Left, 0, len(h.linked))
	for id, l := range h.linked {
		list = append(list, Left{id, l.stage, l.name})
	}
	return list
}

// Inherited holds the programs of another process. They stay attached after its end until Close, or
// until the Hooks that inherit them release them.
type Inherited struct {
	left  []Left
	links map[link.ID]link.Link
}

// Inherit opens the links of another process, which still runs. It skips links that have ended, and
// links of other kinds, because the list may be outdated.
func Inherit(list []Left) (*Inherited, error) {
	i := &Inherited{links: make(map[link.ID]link.Link)}
	var errs []error
	for _, l := range list {
		opened, err := link.NewFromID(l.Link)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("open link %d of %s: %w", l.Link, l.Name, err))
			continue
		}
		if info, err := opened.Info(); err != nil || info.TCX() == nil || l.Stage >= Stages {
			opened.Close()
			continue
		}
		i.left, i.links[l.Link] = append(i.left, l), opened
	}
	return i, errors.Join(errs...)
}

// Close detaches the programs, unless their own process still runs.
func (i *Inherited) Close() error {
	var errs []error
	for _, l := range i.links {
		errs = append(errs, l.Close())
	}
	clear(i.links)
	return errors.Join(errs...)
}

// Inherit makes i part of h: an Attach with the same name at the hook of one of its programs
// atomically replaces that program. The rest stays attached until Disinherit. Call it before Attach.
func (h *Hooks) Inherit(i *Inherited) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.inherited = i
	for _, l := range i.left {
		h.linked[l.Link] = linked{l.Stage, l.Name}
	}
}

// Disinherit detaches the inherited programs that were not replaced.
func (h *Hooks) Disinherit() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := h.inherited
	h.inherited = nil
	if i == nil {
		return nil
	}
	for id := range i.links {
		delete(h.linked, id)
	}
	return i.Close()
}

// heir returns the link that the program with this name inherits among those at a hook, updated to
// program p; nil: none.
func (h *Hooks) heir(there []link.AttachedProgram, name string, p *ebpf.Program) (link.Link, error) {
	if h.inherited == nil {
		return nil, nil
	}
	for _, at := range there {
		id, ok := at.LinkID()
		l := h.inherited.links[id]
		if !ok || l == nil || h.linked[id].name != name {
			continue
		}
		delete(h.inherited.links, id)
		if err := l.Update(p); err != nil {
			delete(h.linked, id)
			return nil, errors.Join(fmt.Errorf("replace the program of link %d: %w", id, err), l.Close())
		}
		return l, nil
	}
	return nil, nil
}
