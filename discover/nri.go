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
	startQueue = 50 * time.Millisecond // longest time between an answer and the next start of a queue

	// A plugin has one connection, with frames of two ttrpc channels: the runtime calls the plugin
	// in one, and the plugin registers in the other.
	nriCalled  = 1
	nriCalls   = 2
	ttrpcHead  = 10      // length of a message's header: size, stream, type and flags
	ttrpcAsk   = 1       // message type: request
	ttrpcReply = 2       // message type: response
	maxTTRPC   = 4 << 20 // longest message: the runtime's own limit
)

// nri is a plugin of containerd's Node Resource Interface. It holds the start of a pod's container
// until its policy is in force, if the container or its pod has labels or annotations of ours. The
// runtime asks about one container of the node at a time. So starts that queue up are held for half a second together. If one takes that long, none is held until it is ready, or for ten
// seconds. Without NRI, or if this process hangs or ends, containers start as usual. NRI's library would add a WebAssembly compiler of 3 MB.
type nri struct {
	addr  string
	log   *slog.Logger
	ready func(context.Context, string) error
	now   func() time.Time
	wait  time.Duration // limit for a queue of starts; 0: another runtime, which reports a container only at its start
	until time.Time     // end of that limit
	asked time.Time     // when the last start was answered
	rests atomic.Bool   // no start is held, because an earlier one is not ready yet
}

// run connects repeatedly until ctx ends.
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

// session is one connection. It answers the runtime's calls one by one.
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
	is, _ := fieldsOf(request) // without parameters the call is valid, too
	switch method {
	case "Configure":
		n.wait = 0
		if string(is.of(2).bytes) == "containerd" {
			n.log.Info("containers with policy start when it is in force", "nri", n.addr)
			n.wait = min(startWait, cmp.Or(time.Duration(is.of(5).number)*time.Millisecond/2, startWait))
		}
		return number(2, 1<<(startEvent-1))
	case "Synchronize":
		return number(2, is.of(3).number) // the field says that there is more
	case "StartContainer":
		n.hold(ctx, starting(is, 1))
	case "StateChange": // the same call in older runtimes
		n.hold(ctx, starting(is, 2))
	}
	return nil
}

// hold waits until the container is ready, or until the limit of its queue.
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

// starting returns the id of a container that starts; "" if neither it nor its pod has labels or
// annotations of ours. pod is the number of the pod's field; the container's field is the next.
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

// message is a ttrpc message in a channel of NRI.
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

// messages reads the messages of both channels, which arrive in frames of any size.
type messages struct {
	r    io.Reader
	came [nriCalls + 1]bytes.Buffer
}

// next returns the next message. Its body is valid until the next call.
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

// field is one field of a protobuf message.
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

// of returns the last field with a number, which is the valid one; zero if there is none.
func (fs fields) of(at protowire.Number) (last field) {
	for _, f := range fs {
		if f.at == at {
			last = f
		}
	}
	return last
}

// text encodes a string field.
func text(at protowire.Number, s string) []byte {
	return protowire.AppendString(protowire.AppendTag(nil, at, protowire.BytesType), s)
}

// number encodes a number field.
func number(at protowire.Number, n uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(nil, at, protowire.VarintType), n)
}
