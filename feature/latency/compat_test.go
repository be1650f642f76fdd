package latency

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// elf is a program of x86-64 machine code, which is at the address 0x400078.
func elf(code []byte) []byte {
	var out bytes.Buffer
	put := func(v any) { binary.Write(&out, binary.LittleEndian, v) }
	const base, headers = 0x400000, 64 + 56
	out.WriteString("\x7fELF\x02\x01\x01")
	out.Write(make([]byte, 9))
	put([]uint16{2, 62}) // ET_EXEC, EM_X86_64
	put(uint32(1))
	put([]uint64{base + headers, 64, 0})
	put(uint32(0))
	put([]uint16{64, 56, 1, 64, 0, 0})
	put([]uint32{1, 5}) // PT_LOAD, readable and executable
	size := uint64(headers + len(code))
	put([]uint64{0, base, base, size, size, 0x1000})
	out.Write(code)
	return out.Bytes()
}

// A 32-bit system call is no call that sends because its number is that of a 64-bit one.
func TestCompatCalls(t *testing.T) {
	testkit.NeedRoot(t)
	if runtime.GOARCH != "amd64" {
		testkit.Skip(t, "the program is for x86-64")
	}
	h := newHost(t)
	h.bridge()
	web, c := h.add("web", "10.66.0.2/24", h.ns)
	h.f.cfg.Containers = known{}
	h.measure(true, c)
	_, err := h.f.Command(t.Context(), &c, api.Ask{Body: api.LatencyFilter{}}) // from here on calls are noted
	must(t, err)

	program := filepath.Join(t.TempDir(), "compat")
	must(t, os.WriteFile(program, elf([]byte{
		0xb8, 20, 0, 0, 0, // mov eax, 20: of 32 bits getpid, of 64 bits writev
		0xbf, 3, 0, 0, 0, // mov edi, 3
		0xcd, 0x80, // int 0x80
		0xb8, 44, 0, 0, 0, // mov eax, 44: sendto
		0xbf, 3, 0, 0, 0, // mov edi, 3
		0xbe, 0x78, 0, 0x40, 0, // mov esi, 0x400078: what is sent
		0xba, 1, 0, 0, 0, // mov edx, 1
		0x45, 0x31, 0xd2, 0x45, 0x31, 0xc0, 0x45, 0x31, 0xc9, // xor r10d, r8d, r9d with themselves
		0x0f, 0x05, // syscall
		0xb8, 60, 0, 0, 0, // mov eax, 60: exit
		0x31, 0xff, // xor edi, edi
		0x0f, 0x05, // syscall
	}), 0o700))
	peer, err := net.ListenPacket("udp4", "127.0.0.1:0")
	must(t, err)
	defer peer.Close()
	conn, err := net.Dial("udp4", peer.LocalAddr().String())
	must(t, err)
	defer conn.Close()
	socket, err := conn.(*net.UDPConn).File()
	must(t, err)
	defer socket.Close()
	cmd := exec.Command(program)
	cmd.ExtraFiles = []*os.File{socket}
	p, err := web.Start(cmd)
	must(t, err)
	var exit *exec.ExitError
	if err := p.Wait(); errors.As(err, &exit) && exit.Sys().(unix.WaitStatus).Signal() == unix.SIGSEGV {
		testkit.Skip(t, "this kernel has no 32-bit system calls")
	}
	must(t, err)
	_, _, err = peer.ReadFrom(make([]byte, 8))
	must(t, err)

	var maps struct {
		Calls *ebpf.Map `ebpf:"fl_calls"`
	}
	must(t, h.f.meter.object.Load(&maps, nil))
	var sockets, calls uint64
	var key uint64
	var of struct {
		Count uint64
		Call  [8][2]uint64
	}
	for i := maps.Calls.Iterate(); i.Next(&key, &of); sockets++ {
		calls += of.Count
	}
	if sockets != 1 || calls != 1 {
		t.Errorf("%d calls by %d sockets are noted, want the one of 64 bits", calls, sockets)
	}
}
