package netcpu_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// A container's own queue is not polled while the container has used up its quota: its packets are
// lost in the queue's ring, and the other queue still delivers a neighbour's.
func TestQueueUnpolled(t *testing.T) {
	testkit.OnKernels(t)
	throttled, err := probe.KthreadsThrottled(kernel.Default())
	must(t, err)
	if !throttled {
		testkit.Skip(t, "kernel does not throttle kernel threads")
	}
	h := newHost(t, sandbox.CPU{})
	h.needNAPIs()
	other, _ := h.join("neighbour", 3)
	// The sender's CPU chooses the queue, as a NIC's steering would.
	must(t, h.wire.SetQueues("wire", "tx", "xps_cpus", func(q int) string { return strconv.Itoa(1 << q) }))
	// Static neighbour entries prevent ARP meanwhile: a request counts as another's packet, and may
	// arrive by the queue that is to be the container's alone.
	for to, box := range map[string]*sandbox.Box{"10.66.0.2": h.box, "10.66.0.3": other} {
		must(t, h.wire.Neighbour("wire", netip.MustParseAddr(to), h.MAC(box, "eth0")))
	}
	h.apply(h.container, policy.NetCPUIsolate)
	h.start(h.box, "udp-recv")
	board := h.start(other, "udp-recv")
	// With a buffer larger than the ring: packets that wait there must not hold the sender back.
	sent := h.startOn(h.wire, []int{0}, "udp-send", "--to", "10.66.0.2:9000", "--rate", "2000", "--buffer", "8388608")
	others := h.startOn(h.wire, []int{1}, "udp-send", "--to", "10.66.0.3:9000", "--rate", "200")
	h.untilThreads("one container's packets alone", payer(h.container), h.uplinkGroup())

	window := func() (lost, received float64) {
		was, a, b, c := lostBy(t, h.wire, "wire"), sent.Read(), others.Read(), board.Read()
		time.Sleep(3 * time.Second)
		lost = float64(lostBy(t, h.wire, "wire")-was) / float64(sent.Read().Since(a).Ops)
		return lost, float64(board.Read().Since(c).Ops) / float64(others.Read().Since(b).Ops)
	}
	until := func(what string, ok func(lost, received float64) bool) {
		t.Helper()
		for end := time.Now().Add(90 * time.Second); ; {
			lost, received := window()
			seen := fmt.Sprintf("%s: %.0f %% of the container's packets are lost in its ring, %.0f %% of the neighbour's arrive", what, 100*lost, 100*received)
			if ok(lost, received) {
				t.Log(seen)
				return
			}
			if time.Now().After(end) {
				t.Fatal(seen)
			}
		}
	}
	until("without a quota", func(lost, received float64) bool { return lost < 0.1 && received > 0.9 })
	h.start(h.box, "burn")
	must(t, h.box.Limit(sandbox.CPU{Quota: time.Millisecond, Period: 100 * time.Millisecond}))
	until("with its quota used up", func(lost, received float64) bool { return lost > 0.5 && received > 0.9 })
	must(t, h.box.Limit(sandbox.CPU{Quota: -1}))
	h.untilThreads("with no quota again", payer(h.container), h.uplinkGroup())
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
}

// lostBy returns how many packets a veth lost to a full ring at its other end.
func lostBy(t *testing.T, b *sandbox.Box, dev string) (n uint64) {
	t.Helper()
	must(t, b.Sysfs(func(sys string) error {
		data, err := os.ReadFile(filepath.Join(sys, "class/net", dev, "statistics/tx_dropped"))
		if err == nil {
			n, err = strconv.ParseUint(strings.TrimSpace(string(data)), 10, 64)
		}
		return err
	}))
	return n
}
