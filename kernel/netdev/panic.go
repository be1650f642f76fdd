package netdev

import (
	"fmt"
	"runtime/debug"
)

// Panic is the value of a panic that has come to another goroutine, with the stack of the first.
type Panic struct {
	Value any
	Stack []byte
}

// Error implements error, for the trace of a process that ends.
func (p *Panic) Error() string { return fmt.Sprintf("%v\n\n%s", p.Value, p.Stack) }

// moved takes what recover returned; nil stays nil. A panic that was moved before keeps its stack.
func moved(value any) *Panic {
	if value == nil {
		return nil
	}
	if p, ok := value.(*Panic); ok {
		return p
	}
	return &Panic{value, debug.Stack()}
}
