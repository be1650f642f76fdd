package rig

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// AttachEmpty attaches a program that does nothing to each of the named tracepoints, as tp_btf
// programs are attached. That measures the cost of any attachment there. The caller closes them.
func AttachEmpty(tracepoints ...string) (links bpf.Links, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, links.Close())
		}
	}()
	for _, name := range tracepoints {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "fl_empty", Type: ebpf.Tracing, AttachType: ebpf.AttachTraceRawTp, AttachTo: name, License: "Dual BSD/GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
		})
		if err != nil {
			return links, fmt.Errorf("empty program for %s: %w", name, err)
		}
		l, err := link.AttachTracing(link.TracingOptions{Program: p})
		if err = errors.Join(err, p.Close()); err != nil { // the link holds it
			return links, fmt.Errorf("attach empty program to %s: %w", name, err)
		}
		links = append(links, l)
	}
	return links, nil
}
