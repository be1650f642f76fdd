package bpf

import (
	"errors"
	"fmt"
	"net"
	"reflect"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var must = testkit.Must

// object returns what bpf2go's function would: two programs that each return the constant fl_const
// plus the variable fl_var, and put fl_const into the hash fl_seen; and some at tracepoints.
func object() (*ebpf.CollectionSpec, error) {
	number := &btf.Int{Name: "u32", Size: 4}
	section := func(name string, flags uint32) *ebpf.MapSpec {
		return &ebpf.MapSpec{
			Name: name, Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1, Flags: flags,
			Contents: []ebpf.MapKV{{Key: uint32(0), Value: make([]byte, 4)}},
			Key:      &btf.Void{}, Value: &btf.Datasec{Name: name, Size: 4},
		}
	}
	hash := func(name string, of ebpf.MapType, most uint32) *ebpf.MapSpec {
		return &ebpf.MapSpec{Name: name, Type: of, KeySize: 4, ValueSize: 8, MaxEntries: most}
	}
	sum := func(name string) *ebpf.ProgramSpec {
		return &ebpf.ProgramSpec{Name: name, Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
			asm.LoadMapValue(asm.R1, 0, 0).WithReference(".rodata"),
			asm.LoadMem(asm.R6, asm.R1, 0, asm.Word),
			asm.LoadMapValue(asm.R1, 0, 0).WithReference(".bss"),
			asm.LoadMem(asm.R7, asm.R1, 0, asm.Word),
			asm.StoreMem(asm.RFP, -4, asm.R6, asm.Word),
			asm.Mov.Imm(asm.R1, 1), asm.StoreMem(asm.RFP, -16, asm.R1, asm.DWord),
			asm.LoadMapPtr(asm.R1, 0).WithReference("fl_seen"),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
			asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -16),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnMapUpdateElem.Call(),
			asm.Mov.Reg(asm.R0, asm.R6), asm.Add.Reg(asm.R0, asm.R7),
			asm.Return(),
		}}
	}
	at := func(name, tracepoint string) *ebpf.ProgramSpec {
		return &ebpf.ProgramSpec{
			Name: name, Type: ebpf.Tracing, AttachType: ebpf.AttachTraceRawTp, AttachTo: tracepoint, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
		}
	}
	own := &ebpf.ProgramSpec{Name: "fl_own", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.LoadMapValue(asm.R1, 0, 0).WithReference(ofCopy), asm.LoadMem(asm.R0, asm.R1, 0, asm.Word), asm.Return(),
	}}
	return &ebpf.CollectionSpec{
		Maps: map[string]*ebpf.MapSpec{
			ofCopy:    section(ofCopy, 0),
			".rodata": section(".rodata", 0), ".bss": section(".bss", 0),
			"fl_seen": hash("fl_seen", ebpf.Hash, 8), "fl_lru": hash("fl_lru", ebpf.LRUHash, 100_000),
			"fl_percpu": hash("fl_percpu", ebpf.PerCPUHash, 20_000), "fl_array": hash("fl_array", ebpf.Array, 5),
		},
		Programs: map[string]*ebpf.ProgramSpec{
			"fl_own": own, "fl_one": sum("fl_one"), "fl_two": sum("fl_two"),
			"fl_in": at("fl_in", "netif_receive_skb"), "fl_out": at("fl_out", "net_dev_start_xmit"), "fl_none": at("fl_none", "fl_no_such"),
		},
		Variables: map[string]*ebpf.VariableSpec{
			"fl_self":  {Name: "fl_self", SectionName: ofCopy, Value: make([]byte, 4), Type: &btf.Var{Name: "fl_self", Type: number}},
			"fl_const": {Name: "fl_const", SectionName: ".rodata", Value: make([]byte, 4), Type: &btf.Var{Name: "fl_const", Type: number}},
			"fl_var":   {Name: "fl_var", SectionName: ".bss", Value: make([]byte, 4), Type: &btf.Var{Name: "fl_var", Type: number}},
		},
	}, nil
}

func open(t *testing.T, vars Vars, shared Maps) *Object {
	t.Helper()
	testkit.NeedRoot(t)
	o, err := Open("test", object, vars, shared)
	must(t, err)
	t.Cleanup(func() { must(t, o.Close()) })
	return o
}

func run(t *testing.T, p *ebpf.Program) uint32 {
	t.Helper()
	got, err := p.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
	must(t, err)
	return got
}

// Programs of an object share its maps and what varies; constants are their own.
func TestLoad(t *testing.T) {
	testkit.OnKernels(t)
	o := open(t, Vars{"fl_const": uint32(1)}, nil)
	if o.Maps()["fl_seen"] != nil {
		t.Error("fl_seen is there before a program needs it")
	}
	var objs struct {
		One *ebpf.Program  `ebpf:"fl_one"`
		Var *ebpf.Variable `ebpf:"fl_var"`
	}
	must(t, o.Load(&objs, nil))
	defer objs.One.Close()
	two, err := o.Program("fl_two", Vars{"fl_const": uint32(2)})
	must(t, err)
	defer two.Close()
	must(t, objs.Var.Set(uint32(10)))
	if one, two := run(t, objs.One), run(t, two); one != 11 || two != 12 {
		t.Errorf("they return %d and %d, want 11 and 12", one, two)
	}
	testkit.Same(t, "usage", []Usage{{"test", "fl_seen", 2, 8}}, o.Usage())

	// Another object uses the same map, which is not its to report.
	other := open(t, Vars{"fl_const": uint32(3)}, Maps{"fl_seen": o.Maps()["fl_seen"]})
	three, err := other.Program("fl_one", nil)
	must(t, err)
	defer three.Close()
	testkit.Same(t, "it returns", 3, run(t, three))
	must(t, other.Close())
	if own, others := o.Usage(), other.Usage(); len(own) != 1 || own[0].Entries != 3 || others != nil {
		t.Errorf("usage %v and %v, want 3 entries of the first", own, others)
	}
}

// attached counts the links of programs of a name.
func attached(t *testing.T, name string) (n int) {
	t.Helper()
	for _, l := range testkit.Links(t) {
		info, err := l.Info()
		if err != nil {
			continue // of another kind, and not ours
		}
		p, err := ebpf.NewProgramFromID(info.Program)
		if err != nil {
			continue // gone meanwhile, and not ours
		}
		is, err := p.Info()
		must(t, errors.Join(err, p.Close()))
		if is.Name == name {
			n++
		}
	}
	return n
}

// It attaches all programs, or none.
func TestAttach(t *testing.T) {
	testkit.OnKernels(t)
	o := open(t, nil, nil)
	links, err := o.Attach("fl_in", "fl_out")
	must(t, err)
	if len(links) != 2 || attached(t, "fl_in") != 1 {
		t.Errorf("%d links, %d of fl_in", len(links), attached(t, "fl_in"))
	}
	for i, l := range links {
		info, err := l.Info()
		must(t, err)
		p, err := ebpf.NewProgramFromID(info.Program)
		must(t, err)
		is, err := p.Info()
		must(t, errors.Join(err, p.Close()))
		testkit.Same(t, fmt.Sprintf("link %d is of", i), []string{"fl_in", "fl_out"}[i], is.Name)
	}
	must(t, links.Close())
	if links, err := o.Attach("fl_in", "fl_one"); links != nil || err == nil {
		t.Errorf("the second is for no tracepoint: %v, %v", links, err)
	}
	// Others may list links, and so have them open, at this moment.
	testkit.Await(t, "no link of the first is left", func() bool { return attached(t, "fl_in") == 0 })
	if links, err := o.Attach("fl_in", "fl_none"); links != nil || !errors.Is(err, btf.ErrNotFound) && !errors.Is(err, ebpf.ErrNotSupported) {
		t.Errorf("without its tracepoint: %v, %v", links, err)
	}
}

// Usage counts each kind of hash map, through all of its batches.
func TestUsage(t *testing.T) {
	testkit.OnKernels(t)
	o := open(t, nil, nil)
	var objs struct {
		LRU    *ebpf.Map `ebpf:"fl_lru"`
		PerCPU *ebpf.Map `ebpf:"fl_percpu"`
		Array  *ebpf.Map `ebpf:"fl_array"`
	}
	must(t, o.Load(&objs, nil))
	want := []Usage{{"test", "fl_lru", 0, 100_000 + 256*ebpf.MustPossibleCPU()}, {"test", "fl_percpu", 0, 20_000}}
	testkit.Same(t, "usage", want, o.Usage())
	n := testkit.Scale(t, 9_000, 50_000)
	for i := range uint32(n) {
		must(t, objs.LRU.Put(i, uint64(i)))
	}
	each := make([]uint64, ebpf.MustPossibleCPU())
	for i := range uint32(20_000) {
		must(t, objs.PerCPU.Put(i, each))
	}
	want[0].Entries, want[1].Entries = n, 20_000
	testkit.Same(t, "usage", want, o.Usage())
	must(t, o.Close())
	if got := o.Usage(); got != nil {
		t.Errorf("usage %v after Close", got)
	}
	if got := (*Object)(nil).Usage(); got != nil {
		t.Errorf("usage %v without an object", got)
	}
}

// An LRU map holds as many entries as it is made for, whichever CPUs make them.
func TestReserve(t *testing.T) {
	testkit.NeedRoot(t)
	o, err := Open("test", func() (*ebpf.CollectionSpec, error) {
		spec, err := object()
		spec.Maps["fl_lru"].MaxEntries = 200
		return spec, err
	}, nil, nil)
	must(t, err)
	defer o.Close()
	var objs struct {
		LRU *ebpf.Map `ebpf:"fl_lru"`
	}
	must(t, o.Load(&objs, nil))
	runtime.LockOSThread() // it ends with the test
	for key := range uint32(200) {
		var one unix.CPUSet
		one.Set(min(int(key), runtime.NumCPU()-1)) // the last one makes most
		must(t, unix.SchedSetaffinity(0, &one))
		must(t, objs.LRU.Put(key, uint64(0)))
	}
	if got := o.Usage(); got[0].Entries != 200 {
		t.Errorf("%d of 200 entries are there", got[0].Entries)
	}
}

func TestUnknown(t *testing.T) {
	testkit.Fails(t, "eight bytes for four", testkit.Err(Open("test", object, Vars{"fl_const": uint64(1)}, nil)))
	testkit.Fails(t, "an unknown variable", testkit.Err(Open("test", object, Vars{"fl_other": 1}, nil)))
	o := open(t, nil, nil)
	testkit.Fails(t, "an unknown program", testkit.Err(o.Program("fl_other", nil)))
	testkit.Fails(t, "an unknown variable", testkit.Err(o.Program("fl_one", Vars{"fl_other": 1})))
	if err := o.Load(&struct {
		Other *ebpf.Map `ebpf:"fl_other"`
	}{}, nil); err == nil {
		t.Error("an unknown map")
	}
}

func TestFields(t *testing.T) {
	type inner struct {
		A *ebpf.Map `ebpf:"a"`
		B int
	}
	var got []string
	fields(reflect.TypeFor[struct {
		inner
		C *ebpf.Program `ebpf:"c"`
	}](), func(name string, typ reflect.Type) { got = append(got, name+" "+typ.String()) })
	testkit.Same(t, "fields", []string{"a *ebpf.Map", "c *ebpf.Program"}, got)
}

// A program is detached although another process has its link open.
func TestUnlink(t *testing.T) {
	ns := testkit.NetNS(t)
	testkit.Veth(t, ns, "flu0", ns, "flu1")
	p, err := testkit.Verdict(ebpf.XDP, "fl_test", 2)
	must(t, err)
	defer p.Close()
	var l link.Link
	must(t, ns.Do(func() error {
		dev, err := net.InterfaceByName("flu0")
		if err == nil {
			l, err = link.AttachXDP(link.XDPOptions{Interface: dev.Index, Program: p})
		}
		return err
	}))
	at := func(l link.Link) uint32 {
		info, err := l.Info()
		must(t, err)
		return info.XDP().Ifindex
	}
	info, err := l.Info()
	must(t, err)
	other, err := link.NewFromID(info.ID)
	must(t, err)
	defer other.Close()
	if at(other) == 0 {
		t.Fatal("it was not attached")
	}
	must(t, Unlink(l))
	if n := at(other); n != 0 {
		t.Fatalf("it is still attached to device %d", n)
	}
}
