package bpf

import (
	"errors"
	"maps"
	"reflect"
	"slices"

	"github.com/cilium/ebpf"
)

// Usage tells how full a map is.
type Usage struct {
	Object, Map         string
	Entries, MaxEntries int
}

// Usage returns how full the object's hash maps are; other maps are always full. The kernel keeps
// no count of entries, so Usage reads all of them: 20 ms for 65,536. It omits a map that cannot be
// read.
func (o *Object) Usage() (list []Usage) {
	if o == nil {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(o.maps)) {
		m := o.maps[name]
		switch m.Type() {
		case ebpf.Hash, ebpf.LRUHash, ebpf.PerCPUHash, ebpf.LRUCPUHash:
			if n, err := entries(m); err == nil {
				list = append(list, Usage{Object: o.name, Map: name, Entries: n, MaxEntries: int(m.MaxEntries())})
			}
		}
	}
	return list
}

// entries counts the entries of a hash map, in batches. A walk by key would start
// again when a program deletes the current key.
func entries(m *ebpf.Map) (total int, err error) {
	const buffer, least = 1 << 18, 64 // bytes, entries: a batch has room for a whole bucket
	values := 1
	if m.Type() == ebpf.PerCPUHash || m.Type() == ebpf.LRUCPUHash {
		if values, err = ebpf.PossibleCPU(); err != nil {
			return 0, err
		}
	}
	key, value := int(m.KeySize()), int(m.ValueSize())
	batch := max(buffer/(key+values*value), least)
	array := func(size, n int) any {
		return reflect.MakeSlice(reflect.SliceOf(reflect.ArrayOf(size, reflect.TypeFor[byte]())), n, n).Interface()
	}
	keys, all := array(key, batch), array(value, batch*values)
	for at := new(ebpf.MapBatchCursor); ; {
		n, err := m.BatchLookup(at, keys, all, nil)
		total += n
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return total, nil
		}
		if err != nil {
			return 0, err
		}
	}
}
