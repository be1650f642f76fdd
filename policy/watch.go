package policy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
)

// A burst of events ends after quiet without an event, once no process has a file open for writing,
// because half a file may be valid and mean something else. If the kernel does not report writers, it
// takes quietUnknown. It ends after Store.burst in any case.
const (
	quiet        = 20 * time.Millisecond
	quietUnknown = 100 * time.Millisecond
)

// Watch reloads when the directory changes, until ctx ends, and calls onChange after each load of
// changed content, valid or not (see Status). It loads at once if there was no load yet. The
// directory need not exist, and it may be replaced as a whole; files may be written, renamed, or
// swapped through a symbolic link, as Kubernetes does with a ConfigMap.
//
// Events only start a look: the content counts. Because events get lost, Watch also looks every 30 s.
// Without inotify (Status.WatchErr) that is all it does. It returns ctx.Err().
func (s *Store) Watch(ctx context.Context, onChange func()) error {
	w, err := newWatcher(s.dir)
	s.setWatchErr(err)
	defer w.close()

	settled := time.NewTimer(0)
	settled.Stop()
	defer settled.Stop()
	var since, last time.Time // of the first and of the last event of the burst
	look := func() {
		s.setWatchErr(w.aim())
		now := time.Now()
		if since.IsZero() {
			since, last = now, now
		}
		accept := noWriter
		switch {
		case now.Sub(since) >= s.burst:
			accept = aWriter
		case now.Sub(last) >= quietUnknown:
			accept = unknownWriter
		}
		// This comes after the watches, so that no change is missed.
		news, found, _ := s.load(false, accept)
		if news {
			onChange()
		}
		if found > accept {
			settled.Reset(quiet) // no event reports the end of a writer
			return
		}
		since = time.Time{}
	}
	look()

	poll := time.NewTicker(s.poll)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e := <-w.events:
			if !w.concerns(e.Name) {
				continue
			}
			last = time.Now()
			if since.IsZero() {
				since = last
			}
			settled.Reset(min(quiet, max(0, s.burst-time.Since(since))))
		case <-w.errors: // most likely an overflow: look
			settled.Reset(quiet)
		case <-settled.C:
			look()
		case <-poll.C:
			if since.IsZero() {
				look()
			}
		}
	}
}

func (s *Store) setWatchErr(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.WatchErr = err
}

// watcher aims inotify at a directory that comes and goes: at the directory itself and at its
// nearest existing ancestor.
type watcher struct {
	dir    string // absolute
	notify *fsnotify.Watcher
	err    error // why there is no notify
	aimed  map[string]os.FileInfo
	events chan fsnotify.Event // nil, so never ready, without notify
	errors chan error
}

func newWatcher(dir string) (*watcher, error) {
	w := &watcher{dir: dir, aimed: map[string]os.FileInfo{}}
	if abs, err := filepath.Abs(dir); err == nil {
		w.dir = abs
	}
	n, err := fsnotify.NewWatcher()
	if err != nil {
		w.err = fmt.Errorf("watch %s: %w", dir, err)
		return w, w.err
	}
	w.notify, w.events, w.errors = n, n.Events, n.Errors
	return w, nil
}

func (w *watcher) close() {
	if w.notify != nil {
		w.notify.Close()
	}
}

// aim updates the watches.
func (w *watcher) aim() error {
	if w.notify == nil {
		return w.err
	}
	want := map[string]os.FileInfo{}
	if st, err := os.Stat(w.dir); err == nil {
		want[w.dir] = st
	}
	for up := filepath.Dir(w.dir); ; up = filepath.Dir(up) {
		if st, err := os.Stat(up); err == nil {
			want[up] = st
			break
		}
		if up == filepath.Dir(up) {
			break
		}
	}
	alive := w.notify.WatchList()
	for name, old := range w.aimed {
		// The watch follows the old inode of a replaced directory, and is gone with a removed one,
		// even if the inode is in use again.
		if st, ok := want[name]; !ok || !os.SameFile(st, old) || !slices.Contains(alive, name) {
			// An error means that the watch went with its directory.
			_ = w.notify.Remove(name)
			delete(w.aimed, name)
		}
	}
	var errs []error
	for name, st := range want {
		if _, ok := w.aimed[name]; ok {
			continue
		}
		if err := w.notify.Add(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("watch %s: %w", name, err))
		} else if err == nil {
			w.aimed[name] = st
		}
	}
	return errors.Join(errs...)
}

// concerns reports whether an event at path can matter: below the directory, or on the way to it.
func (w *watcher) concerns(path string) bool {
	return path == w.dir || strings.HasPrefix(path, w.dir+"/") || strings.HasPrefix(w.dir, strings.TrimSuffix(path, "/")+"/")
}
