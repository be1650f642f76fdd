package identity

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// bring makes a BPF map hold what want says of the stale keys; false is nothing. What
// fails stays stale. However much fails, the error is one sentence, and the same one
// when the same fails again.
func (s *stated[K]) bring(to *ebpf.Map, want func(K) (identityFlOwner, bool), what string) (changed bool, err error) {
	var forget, note failures
	for k := range s.stale { // first, as that makes room
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

// failures counts what failed, and keeps why the first did.
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
	return fmt.Errorf("%s %d %ss: %w", operation, f.n, what, f.first)
}
