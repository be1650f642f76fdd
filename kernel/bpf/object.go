// Package bpf loads BPF objects: it creates their maps, sets their variables, attaches their
// programs to tracepoints, and reports how full maps are. It does not attach to devices, as
// packages qdisc and netdev do, and does not know the purpose of a program. Features and the rig of
// the benchmarks use it.
package bpf

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
)

// Vars are values of global variables, by name.
type Vars map[string]any

// Maps are maps by name.
type Maps map[string]*ebpf.Map

// Object is one compiled .bpf.c. Each map, and each section of variables that change, is made once,
// for the first program that refers to it. All programs share it until Close. Constants (const
// volatile) are separate for each program, and variables of the section ".data.copy" for each Copy.
// Methods are safe for concurrent use.
type Object struct {
	name string
	spec *ebpf.CollectionSpec

	mu     sync.Mutex
	maps   Maps
	shared Maps               // maps of other objects, which close them
	idle   map[string][]*Copy // by program
	sweep  *time.Timer        // of idle copies; nil: there are none
	closed bool
}

// Open reads an object by bpf2go's function and sets variables for all of its programs. It loads
// nothing into the kernel yet. Programs use shared maps, of other objects, in place of their own.
func Open(name string, read func() (*ebpf.CollectionSpec, error), vars Vars, shared Maps) (*Object, error) {
	spec, err := read()
	if err == nil {
		err = errors.Join(set(spec, vars), reserve(spec))
	}
	if err != nil {
		return nil, fmt.Errorf("open BPF object %s: %w", name, err)
	}
	return &Object{name: name, spec: spec, maps: make(Maps), shared: shared, idle: make(map[string][]*Copy)}, nil
}

// reserve enlarges each LRU map by the entries that every CPU may keep for itself: up to 128 free
// ones, and 128 recently filled ones. Other CPUs cannot use these. Without them, a map of 8,192
// entries shared by 64 CPUs would evict live entries at once before Linux 6.16.
func reserve(spec *ebpf.CollectionSpec) error {
	cpus, err := ebpf.PossibleCPU()
	for _, m := range spec.Maps {
		if m.Type == ebpf.LRUHash {
			m.MaxEntries += uint32(256 * cpus)
		}
	}
	return err
}

func set(spec *ebpf.CollectionSpec, vars Vars) error {
	for name, value := range vars {
		v := spec.Variables[name]
		if v == nil {
			return fmt.Errorf("set %s: no such variable", name)
		}
		if err := v.Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return nil
}

// Load fills the fields of a struct that have bpf2go's tags. It loads programs with the given
// values of variables. The caller closes the programs; maps and variables belong to the Object.
func (o *Object) Load(to any, vars Vars) error {
	var programs, names []string
	fields(reflect.TypeOf(to).Elem(), func(name string, typ reflect.Type) {
		switch typ {
		case reflect.TypeFor[*ebpf.Program]():
			programs = append(programs, name)
		case reflect.TypeFor[*ebpf.Map]():
			names = append(names, name)
		case reflect.TypeFor[*ebpf.Variable]():
			if v := o.spec.Variables[name]; v != nil {
				names = append(names, v.SectionName)
			}
		}
	})
	return o.load(vars, programs, names, nil, func(c *ebpf.Collection) error { return c.Assign(to) })
}

// fields calls fn with all tagged fields of a struct.
func fields(t reflect.Type, fn func(name string, typ reflect.Type)) {
	for i := range t.NumField() {
		f := t.Field(i)
		if name := f.Tag.Get("ebpf"); name != "" {
			fn(name, f.Type)
		} else if f.Type.Kind() == reflect.Struct {
			fields(f.Type, fn)
		}
	}
}

// Program loads one program, which the caller closes. change may modify its spec before.
func (o *Object) Program(name string, vars Vars, change ...func(*ebpf.ProgramSpec)) (p *ebpf.Program, err error) {
	err = o.load(vars, []string{name}, nil, change, func(c *ebpf.Collection) error {
		p = c.DetachProgram(name)
		return nil
	})
	return p, err
}

// Maps returns the maps that programs have needed so far, and the sections of variables, so that
// other objects can share them. They belong to the Object.
func (o *Object) Maps() Maps {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.maps)
}

// Attach loads programs and attaches them to their tracepoints, in this order: all of them, or
// none. The error matches ebpf.ErrNotSupported or btf.ErrNotFound where the kernel has no such
// tracepoint.
func (o *Object) Attach(programs ...string) (links Links, err error) {
	loaded, err := o.Programs(programs...)
	if err != nil {
		return nil, err
	}
	links, err = Attach(loaded...)
	for _, p := range loaded {
		err = errors.Join(err, p.Close())
	}
	return links, err
}

// Programs loads programs, in this order: all of them, or none. The caller closes them.
func (o *Object) Programs(names ...string) (programs []*ebpf.Program, err error) {
	err = o.load(nil, names, nil, nil, func(c *ebpf.Collection) error {
		for _, name := range names {
			programs = append(programs, c.DetachProgram(name))
		}
		return nil
	})
	return programs, err
}

// Attach attaches loaded programs to their tracepoints, in this order: all of them, or none.
func Attach(programs ...*ebpf.Program) (links Links, err error) {
	for _, p := range programs {
		l, err := link.AttachTracing(link.TracingOptions{Program: p})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("attach %v: %w", p, err), links.Close())
		}
		links = append(links, l)
	}
	return links, nil
}

// Links are attached programs.
type Links []link.Link

// Close detaches them, the first one first.
func (ls Links) Close() error {
	var errs []error
	for _, l := range ls {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// Unlink detaches a program from a device or a cgroup, and closes the link. Close alone does not
// detach it while another process, such as bpftool, has the link open.
func Unlink(l link.Link) error { return errors.Join(l.Detach(), l.Close()) }

// load loads programs, all maps that they refer to, and the named maps, and calls use with them. It
// closes everything that use does not take.
func (o *Object) load(vars Vars, programs, names []string, change []func(*ebpf.ProgramSpec), use func(*ebpf.Collection) error) (err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	defer func() {
		if err != nil {
			err = fmt.Errorf("load BPF object %s: %w", o.name, err)
		}
	}()
	need := make(map[string]bool)
	for _, name := range names {
		need[name] = true
	}
	wanted := make(map[string]*ebpf.ProgramSpec)
	for _, name := range programs {
		p := o.spec.Programs[name].Copy()
		if p == nil {
			return fmt.Errorf("no program %s", name)
		}
		for _, c := range change {
			c(p)
		}
		for _, ins := range p.Instructions {
			if ins.IsLoadFromMap() && ins.Reference() != "" {
				need[ins.Reference()] = true
			}
		}
		wanted[name] = p
	}
	// Copying the whole spec would take as long as loading a program.
	spec := &ebpf.CollectionSpec{Programs: wanted, Maps: maps.Clone(o.spec.Maps), Variables: maps.Clone(o.spec.Variables), ByteOrder: o.spec.ByteOrder}
	maps.DeleteFunc(spec.Maps, func(name string, _ *ebpf.MapSpec) bool { return !need[name] })
	maps.DeleteFunc(spec.Variables, func(name string, v *ebpf.VariableSpec) bool { return !need[v.SectionName] && vars[name] == nil })
	spec = spec.Copy()
	if err := set(spec, vars); err != nil {
		return err
	}
	maps.DeleteFunc(spec.Variables, func(_ string, v *ebpf.VariableSpec) bool { return !need[v.SectionName] })

	have := make(Maps)
	for name := range spec.Maps {
		if m := cmp.Or(o.shared[name], o.maps[name]); m != nil {
			have[name] = m
		}
	}
	var c *ebpf.Collection
	err = WithTypes(func(types *btf.Cache) (err error) {
		c, err = ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: have, Cache: types})
		return err
	})
	if err != nil {
		return err
	}
	for name, m := range c.Maps {
		switch {
		case have[name] != nil:
			m.Close() // a copy of the descriptor
			c.Maps[name] = have[name]
		case name != ofCopy && !strings.HasPrefix(name, ".rodata"):
			have[name], o.maps[name] = m, m
		}
	}
	err = use(c)
	maps.DeleteFunc(c.Maps, func(name string, _ *ebpf.Map) bool { return have[name] != nil })
	c.Close()
	return err
}

// Close closes the maps. Attached programs continue to use them.
func (o *Object) Close() error {
	if o == nil {
		return nil
	}
	o.mu.Lock()
	o.closed = true
	o.mu.Unlock()
	o.closeIdle()
	o.mu.Lock()
	defer o.mu.Unlock()
	var errs []error
	for name, m := range o.maps {
		errs = append(errs, m.Close())
		delete(o.maps, name)
	}
	return errors.Join(errs...)
}
