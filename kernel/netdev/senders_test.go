package netdev

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// A socket whose peer does not read is a Sender: its data waits for the peer's window.
func TestSenders(t *testing.T) {
	testkit.OnKernels(t)
	ns := testkit.NetNS(t)
	open, err := Open(ns.Path)
	testkit.Must(t, err)
	defer open.Close()
	var from, to net.Conn
	testkit.Must(t, open.Do(func() error {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer l.Close()
		if from, err = net.Dial("tcp4", l.Addr().String()); err != nil {
			return err
		}
		to, err = l.Accept()
		return err
	}))
	defer to.Close()
	defer from.Close()
	if list, err := open.Senders(10); err != nil || len(list) != 0 {
		t.Fatalf("nothing is sent: %+v, %v", list, err)
	}
	go io.Copy(from, endless{})
	var was Sender
	testkit.AwaitNone(t, func() string {
		list, err := open.Senders(10)
		testkit.Must(t, err)
		if len(list) == 1 {
			s, before := list[0], was
			was = s
			if before.Cookie == s.Cookie && s.Unsent > 0 && s.Window > before.Window && s.Acked > 0 && s.Segments > 0 && s.Busy >= s.Window && s.Cgroup != 0 {
				return ""
			}
		}
		return fmt.Sprintf("none waits for its peer's window: %+v", list)
	})
	testkit.Fails(t, "both ends of a connection as one socket", testkit.Err(open.Senders(1)))
}

type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }

// senderMessage is a message with struct tcp_info of n bytes.
func senderMessage(n int, congestion string) []byte {
	ne := binary.NativeEndian
	b := make([]byte, sizeofDiag)
	ne.PutUint32(b[diagCookie:], 7)
	attr := func(typ uint16, v []byte) {
		h := make([]byte, 4)
		ne.PutUint16(h, uint16(4+len(v)))
		ne.PutUint16(h[2:], typ)
		b = append(append(b, h...), v...)
		b = append(b, make([]byte, -len(v)&3)...)
	}
	info := make([]byte, max(n, sizeofTCPInfo))
	ne.PutUint32(info[tcpNotSent:], 5)
	ne.PutUint32(info[tcpUnacked:], 3)
	ne.PutUint32(info[tcpSendMSS:], 1000)
	ne.PutUint64(info[tcpMaxPacing:], unlimitedPacing)
	ne.PutUint64(info[tcpAcked:], 11)
	ne.PutUint64(info[tcpBusy:], 13)
	attr(diagInfo, info[:n])
	attr(diagCongestion, []byte(congestion+"\x00"))
	attr(diagCgroup, ne.AppendUint64(nil, 9))
	return b
}

func TestParseSender(t *testing.T) {
	want := Sender{Cookie: 7, Cgroup: 9, Unsent: 5, InFlight: 3000, Acked: 11, Busy: 13 * time.Microsecond}
	if s, ok, err := parseSender(senderMessage(248, "cubic")); s != want || !ok || err != nil {
		t.Errorf("%+v, %v, %v; want %+v", s, ok, err, want)
	}
	want.Paced = true
	if s, _, _ := parseSender(senderMessage(sizeofTCPInfo, "bbr")); s != want {
		t.Errorf("%+v; want %+v", s, want)
	}
	if _, ok, err := parseSender(senderMessage(200, "cubic")); ok || err != nil {
		t.Errorf("of an old kernel: %v, %v", ok, err)
	}
	if _, _, err := parseSender(make([]byte, 20)); err == nil {
		t.Error("a short message has no error")
	}
}

func FuzzParseSender(f *testing.F) {
	f.Add(senderMessage(248, "cubic"))
	f.Add(senderMessage(8, ""))
	f.Add(make([]byte, unix.SizeofNlMsghdr))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _, _ = parseSender(b) })
}
