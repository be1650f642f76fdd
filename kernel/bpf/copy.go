package bpf

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
)

// ofCopy is the section of the variables that each copy of a program has separately.
const ofCopy = ".data.copy"

// Idle copies wait for their next user. Verifying a new one takes milliseconds, more than
// everything else that a short-lived container costs. Up to mostIdle copies of a program wait, for
// idleTime.
const (
	mostIdle = 16
	idleTime = 5 * time.Second
)

// Copy is a loaded program with its own variables, those in the section ".data.copy" of its source.
// The same program then runs for many devices or cgroups.
type Copy struct {
	*ebpf.Program
	of    *Object
	name  string
	vars  *ebpf.Map
	until time.Time // end of idleTime
}

// Copy returns a copy of a program with these variables; the others of its section are 0. The
// caller closes it once it is no longer attached.
func (o *Object) Copy(name string, vars Vars) (*Copy, error) {
	o.mu.Lock()
	var c *Copy
	if idle := o.idle[name]; len(idle) > 0 {
		c, o.idle[name] = idle[len(idle)-1], idle[:len(idle)-1]
	}
	o.mu.Unlock()
	if c == nil {
		c = &Copy{of: o, name: name}
		err := o.load(nil, []string{name}, []string{ofCopy}, nil, func(all *ebpf.Collection) error {
			c.Program, c.vars = all.DetachProgram(name), all.DetachMap(ofCopy)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if err := c.Set(vars); err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

// Set sets the variables, even while the copy is attached; the others of its section become 0.
func (c *Copy) Set(vars Vars) error {
	value, err := c.of.section(vars)
	if err == nil {
		err = c.vars.Put(uint32(0), value)
	}
	if err != nil {
		return fmt.Errorf("set the variables of BPF program %s: %w", c.name, err)
	}
	return nil
}

// section returns the bytes of the section with these variables.
func (o *Object) section(vars Vars) ([]byte, error) {
	value := make([]byte, o.spec.Maps[ofCopy].ValueSize)
	for name, v := range vars {
		spec := o.spec.Variables[name]
		if spec == nil || spec.SectionName != ofCopy {
			return nil, fmt.Errorf("%s is no variable of a copy", name)
		}
		spec = spec.Copy()
		if err := spec.Set(v); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		copy(value[spec.Offset:], spec.Value)
	}
	return value, nil
}

// Close returns the copy to the idle ones. It must not be attached.
func (c *Copy) Close() error {
	o := c.of
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || len(o.idle[c.name]) >= mostIdle {
		return c.close()
	}
	c.until = time.Now().Add(idleTime)
	o.idle[c.name] = append(o.idle[c.name], c)
	if o.sweep == nil {
		o.sweep = time.AfterFunc(idleTime, o.closeIdle)
	}
	return nil
}

// closeIdle closes the copies whose idleTime is over, and schedules itself again while others
// remain.
func (o *Object) closeIdle() {
	o.mu.Lock()
	defer o.mu.Unlock()
	now, left := time.Now(), false
	for name, idle := range o.idle {
		// The first has been idle the longest.
		for len(idle) > 0 && (o.closed || !now.Before(idle[0].until)) {
			idle[0].close() // closing an open descriptor does not fail
			idle = idle[1:]
		}
		o.idle[name] = idle
		left = left || len(idle) > 0
	}
	o.sweep = nil
	if left {
		o.sweep = time.AfterFunc(idleTime, o.closeIdle)
	}
}

func (c *Copy) close() error { return errors.Join(c.Program.Close(), c.vars.Close()) }
