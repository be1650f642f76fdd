package identity

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// bring writes the value that want returns for each stale key to a BPF map, and deletes
// the key for false. Keys that fail stay stale. The error is one sentence however many
// keys fail, and the same when the same keys fail again.
func (s *stated[K, V]) bring(to *ebpf.Map, want func(K) (V, bool), what string) (changed bool, err error) {
	var forget, note failures
	for k := range s.stale { // first, to make room
		if _, wanted := want(k); wanted {
			continue
		}
		if _, held := s.held[k]; held {
			changed = true
			if err := to.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				forget.add(err)
				continue
			}
			delete(s.held, k)
		}
		delete(s.stale, k)
	}
	for k := range s.stale {
		v, wanted := want(k)
		if !wanted {
			continue
		}
		if old, held := s.held[k]; !held || old != v {
			changed = true
			if err := to.Put(k, v); err != nil {
				note.add(err)
				continue
			}
			s.held[k] = v
		}
		delete(s.stale, k)
	}
	return changed, errors.Join(forget.err("forget", what), note.err("note", what))
}

// failures counts failures, and keeps the first error.
type failures struct {
	n     int
	first error
}

func (f *failures) add(err error) {
	if f.n++; f.n == 1 {
		f.first = err
	}
}

func (f *failures) err(operation, what string) error {
	if f.n == 0 {
		return nil
	}
	return fmt.Errorf("%s %d %s: %w", operation, f.n, what, f.first)
}
