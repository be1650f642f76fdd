package discover

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

const (
	nriAddr    = "/run/nri/nri.sock"
	startEvent = 6 // START_CONTAINER
	startWait  = 500 * time.Millisecond
	startRest  = 10 * time.Second
	startQueue = 50 * time.Millisecond // between an answer and the next start of a queue, at most

	// A plugin has one connection with frames of two channels of ttrpc: in one the runtime calls it, in the
	// other it registers.
	nriCalled  = 1
	nriCalls   = 2
	ttrpcHead  = 10      // size, stream, type and flags of a message
	ttrpcAsk   = 1       // type of a message
	ttrpcReply = 2       // another
	maxTTRPC   = 4 << 20 // of a message: the runtime's own limit
)

// nri is a plugin of containerd's Node Resource Interface. It holds the start of a pod's container, if one of
// these has labels or annotations of ours, until it is ready. The runtime asks about one container of the node
// at a time, so all starts that wait for each other are held for half a second together, and after one that took
// so long none until that one is ready, or for ten. Without that interface, and when this process hangs or ends, containers start as ever.
// The interface's own library brings a compiler for WebAssembly, 3 MB of the binary.
type nri struct {
	addr  string
	log   *slog.Logger
	ready func(context.Context, string) error
	now   func() time.Time
	wait  time.Duration // with starts that wait for each other; 0: another runtime, which tells nothing of a container before its start
	until time.Time     // the end of that
	asked time.Time     // the last start was answered
	rests atomic.Bool   // none is held, as one that was is not ready yet
}

// run connects again and again until ctx ends.
func (n *nri) run(ctx context.Context) {
	said := ""
	retry(ctx, minBackOff, maxBackOff, func(ctx context.Context) {
		err := n.session(ctx)
		if ctx.Err() == nil && !errors.Is(err, fs.ErrNotExist) && err.Error() != said {
			said = err.Error()
			n.log.Warn("containers may start before their policy is in force", "nri", n.addr, "err", err)
		}
	})
}

// session is one connection. It answers one call after the other, as the runtime makes them.
func (n *nri) session(ctx context.Context) error {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", n.addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	register := slices.Concat(text(1, "nri.pkg.api.v1alpha1.Runtime"), text(2, "RegisterPlugin"),
		text(3, string(text(1, "fairlead"))+string(text(2, "90"))))
	if err := (message{nriCalls, 1, ttrpcAsk, register}).send(conn); err != nil {
		return err
	}
	from := messages{r: conn}
	for {
		m, err := from.next()
		if err != nil {
			return err
		}
		body, err := fieldsOf(m.body)
		if err != nil {
			return err
		}
		if m.channel == nriCalls {
			if why := string(body.of(1).bytes); why != "" {
				return fmt.Errorf("register plugin: %q", why)
			}
			continue
		}
		reply := text(2, string(n.called(ctx, string(body.of(2).bytes), body.of(3).bytes)))
		if err := (message{nriCalled, m.stream, ttrpcReply, reply}).send(conn); err != nil {
			return err
		}
	}
}

// called returns the answer to a call of a method.
func (n *nri) called(ctx context.Context, method string, request []byte) []byte {
	is, _ := fieldsOf(request) // without them it starts
	switch method {
	case "Configure":
		n.wait = 0
		if string(is.of(2).bytes) == "containerd" {
			n.log.Info("containers with policy start when it is in force", "nri", n.addr)
			n.wait = min(startWait, cmp.Or(time.Duration(is.of(5).number)*time.Millisecond/2, startWait))
		}
		return number(2, 1<<(startEvent-1))
	case "Synchronize":
		return number(2, is.of(3).number) // there is more
	case "StartContainer":
		n.hold(ctx, starting(is, 1))
	case "StateChange": // the same, of older runtimes
		n.hold(ctx, starting(is, 2))
	}
	return nil
}

// hold waits until the container is ready.
func (n *nri) hold(ctx context.Context, id string) {
	now := n.now()
	if now.Sub(n.asked) > startQueue {
		n.until = now.Add(n.wait)
	}
	if left := n.until.Sub(now); id != "" && left > 0 && !n.rests.Load() {
		if err := n.within(ctx, left, id); err != nil {
			n.log.Warn("containers start before their policy is in force", "first", id, "err", err)
			if left == n.wait {
				n.rests.Store(true)
				go func() {
					n.within(ctx, startRest, id)
					n.rests.Store(false)
				}()
			}
		}
	}
	n.asked = n.now()
}

func (n *nri) within(ctx context.Context, most time.Duration, id string) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	return n.ready(ctx, id)
}

// starting returns the id of a container that starts; "" if neither it nor its pod has labels or annotations of
// ours. The pod is the field with that number of the request, the container the next.
func starting(request fields, pod protowire.Number) (id string) {
	ours := false
	for _, part := range request {
		if part.at != pod && part.at != pod+1 {
			continue
		}
		about, _ := fieldsOf(part.bytes)
		if part.at == pod+1 {
			id = string(about.of(1).bytes)
		}
		for _, f := range about {
			if f.at == 5 || f.at == 6 {
				entry, _ := fieldsOf(f.bytes)
				ours = ours || asks(map[string]string{string(entry.of(1).bytes): ""})
			}
		}
	}
	if !ours {
		return ""
	}
	return id
}

// message is one of ttrpc, in a channel of NRI.
type message struct {
	channel, stream uint32
	kind            byte
	body            []byte
}

func (m message) send(to io.Writer) error {
	var b []byte
	for _, n := range []int{int(m.channel), ttrpcHead + len(m.body), len(m.body), int(m.stream)} {
		b = binary.BigEndian.AppendUint32(b, uint32(n))
	}
	_, err := to.Write(append(append(b, m.kind, 0), m.body...))
	return err
}

// messages reads those of both channels, which come in frames of any size.
type messages struct {
	r    io.Reader
	came [nriCalls + 1]bytes.Buffer
}

// next returns the next one, whose body counts until the next call.
func (ms *messages) next() (message, error) {
	for {
		for channel := range ms.came {
			b := ms.came[channel].Bytes()
			if len(b) < ttrpcHead {
				continue
			}
			size := binary.BigEndian.Uint32(b)
			if size > maxTTRPC {
				return message{}, fmt.Errorf("a message of %d bytes is too long", size)
			}
			if len(b) < ttrpcHead+int(size) {
				continue
			}
			b = ms.came[channel].Next(ttrpcHead + int(size))
			if ms.came[channel].Len() == 0 {
				ms.came[channel] = bytes.Buffer{} // the list of all containers of the node is long, and comes once
			}
			return message{uint32(channel), binary.BigEndian.Uint32(b[4:]), b[8], b[ttrpcHead:]}, nil
		}
		var head [8]byte
		if _, err := io.ReadFull(ms.r, head[:]); err != nil {
			return message{}, err
		}
		channel, size := binary.BigEndian.Uint32(head[:]), binary.BigEndian.Uint32(head[4:])
		if channel != nriCalled && channel != nriCalls || size > ttrpcHead+maxTTRPC {
			return message{}, fmt.Errorf("a frame of %d bytes in channel %d: there is none", size, channel)
		}
		if _, err := io.CopyN(&ms.came[channel], ms.r, int64(size)); err != nil {
			return message{}, err
		}
	}
}

// field is one of a message of protobuf.
type field struct {
	at     protowire.Number
	number uint64
	bytes  []byte
}

type fields []field

func fieldsOf(b []byte) (all fields, err error) {
	for len(b) > 0 {
		at, kind, size := protowire.ConsumeTag(b)
		f := field{at: at}
		if size >= 0 {
			b = b[size:]
			switch kind {
			case protowire.BytesType:
				f.bytes, size = protowire.ConsumeBytes(b)
			case protowire.VarintType:
				f.number, size = protowire.ConsumeVarint(b)
			default:
				size = protowire.ConsumeFieldValue(at, kind, b)
			}
		}
		if size < 0 {
			return nil, fmt.Errorf("read message: %w", protowire.ParseError(size))
		}
		all, b = append(all, f), b[size:]
	}
	return all, nil
}

// of returns the last field with a number, which counts; zero without.
func (fs fields) of(at protowire.Number) (last field) {
	for _, f := range fs {
		if f.at == at {
			last = f
		}
	}
	return last
}

// text is a field for a message.
func text(at protowire.Number, s string) []byte {
	return protowire.AppendString(protowire.AppendTag(nil, at, protowire.BytesType), s)
}

// number is another.
func number(at protowire.Number, n uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(nil, at, protowire.VarintType), n)
}
