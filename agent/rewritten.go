package agent

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// rewritten applies policy again when another program writes to the cgroup of a container. An
// engine, for example, writes all limits of a container at each update. The features then combine
// its values with policy. rewritten watches the directories of containers with a policy. @27-29t
type rewritten struct {
	journal *journal.Journal
	opener  func() journal.Opener
	again   func(feature string, id container.ID) // of all features if it is ""
	now     func() time.Time
	log     *slog.Logger

	mu     sync.Mutex
	opened chan *fsnotify.Watcher  // capacity 1: passes events to run; nil: run has not begun or has ended
	events *fsnotify.Watcher       // nil before the first directory
	of     map[string]container.ID // by directory
	rows   map[container.ID]*rewrite
}

// rewrite records what other programs wrote to one container's files.
type rewrite struct {
	file  string
	by    []journal.Owner // owners of the claims that were overwritten; none: the file has no claim
	last  time.Time       // time of the last answer
	times int             // answers in quick succession
}

const (
	// written is how long to wait for further writes: an engine writes several files at an update.
	written = 100 * time.Millisecond
	// answering is the least time between two answers for one container. It bounds the cost of a
	// program that keeps writing.
	answering = time.Second
	// contested is the number of answers that count as a fight: each within five times answering of
	// the one before, and each followed by another write.
	contested = 5
)

func newRewritten(j *journal.Journal, opener func() journal.Opener, p pace, log *slog.Logger, again func(string, container.ID)) *rewritten {
	return &rewritten{journal: j, opener: opener, again: again, now: p.now, log: log, rows: make(map[container.ID]*rewrite)}
}

// follow replaces the set of containers whose directories are watched.
func (w *rewritten) follow(targets map[container.ID]*policy.Target) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.opened == nil {
		return
	}
	of := make(map[string]container.ID)
	for id, t := range targets {
		if len(t.Origins) == 0 && len(t.Decided) == 0 {
			continue
		}
		for _, dir := range []string{t.Container.Cgroup.V2, t.Container.Cgroup.CPU, t.Container.Cgroup.IO} {
			if dir != "" {
				of[dir] = id
			}
		}
	}
	if w.events == nil {
		if len(of) == 0 {
			return
		}
		events, err := fsnotify.NewBufferedWatcher(256)
		if err != nil {
			w.opened = nil // the host has no inotify instances left
			w.log.Warn("what others write to containers' cgroups is seen only every few minutes", "err", err)
			return
		}
		w.events = events
		w.opened <- events
	}
	for dir := range w.of {
		if _, still := of[dir]; !still {
			w.events.Remove(dir) // ErrNonExistentWatch: the directory has gone
		}
	}
	for dir, id := range of {
		if was, had := w.of[dir]; (!had || was != id) && w.events.Add(dir) != nil {
			delete(of, dir) // it has just gone, or there are too many watches: the next round retries
		} else if w.rows[id] == nil {
			w.rows[id] = new(rewrite)
		}
	}
	maps.DeleteFunc(w.rows, func(id container.ID, _ *rewrite) bool { return targets[id] == nil })
	w.of = of
}

// begin lets follow watch directories, and returns the channel that run needs.
func (w *rewritten) begin() <-chan *fsnotify.Watcher {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.opened = make(chan *fsnotify.Watcher, 1)
	return w.opened
}

// run answers writes until ctx ends.
func (w *rewritten) run(ctx context.Context, opened <-chan *fsnotify.Watcher) {
	var events chan fsnotify.Event
	var errs chan error
	files := make(map[string]bool)
	timer := time.NewTimer(0)
	for {
		select {
		case <-ctx.Done():
			w.end()
			return
		case first := <-opened:
			events, errs = first.Events, first.Errors
		case e := <-events:
			if e.Has(fsnotify.Write) && limits.MatchString(filepath.Base(e.Name)) {
				if len(files) == 0 {
					timer.Reset(written)
				}
				files[e.Name] = true
			}
		case err := <-errs: // an overflow, for example: the next refresh covers what was lost
			w.log.Warn("follow writes to containers' cgroups", "err", err)
		case <-timer.C:
			if w.answer(files); len(files) > 0 {
				timer.Reset(answering)
			}
		}
	}
}

func (w *rewritten) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.opened = nil; w.events != nil {
		w.events.Close()
	}
}

// limits matches the files of a cgroup that limit anything.
var limits = regexp.MustCompile(`^(cpu|io|blkio)\.`)

// answer applies policy again where other programs wrote to files, unless the journal's claims on
// the file still hold. Files that it is too early to answer stay in files.
func (w *rewritten) answer(files map[string]bool) {
	now, open := w.now(), w.opener()
	for file := range files {
		var by []journal.Owner
		var claimed bool
		knob, err := open(journal.Ref{Kind: cgroup.KindFile, Object: file})
		if err == nil {
			path := knob.Ref().Object // a file with one line per device has one knob per device
			by, claimed, err = w.journal.Overwritten(open, func(e journal.Entry) bool {
				return e.Ref.Object == path || strings.HasPrefix(e.Ref.Object, path+" ")
			})
		}
		if err != nil || claimed && by == nil || w.note(file, by, now) {
			delete(files, file)
		}
	}
}

// note answers a write to a file, or returns false if it is too early.
func (w *rewritten) note(file string, by []journal.Owner, now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	id := w.of[filepath.Dir(file)]
	r := w.rows[id]
	if r == nil {
		return true
	}
	switch since := now.Sub(r.last); {
	case since == 0: // another file of the same update
	case since < answering:
		return false
	case since > 5*answering:
		r.times = 1
	default:
		r.times++
	}
	r.file, r.by, r.last = file, by, now
	if len(by) == 0 {
		w.again("", id)
	}
	for _, o := range by {
		w.again(o.Feature, id)
	}
	return true
}

// contest adds to the result of an Apply that another program keeps overwriting a value.
func (w *rewritten) contest(name string, id container.ID, err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.rows[id]
	if r == nil || r.times < contested || w.now().Sub(r.last) > 5*answering || !slices.ContainsFunc(r.by, func(o journal.Owner) bool { return o.Feature == name }) {
		return err
	}
	return partly(err, fmt.Sprintf("another program keeps writing %s: have only one of the two set it", r.file))
}
