package traffic_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

// running is a list of containers.
type running struct {
	mu   sync.Mutex
	list []container.Container
}

func (r *running) set(list ...container.Container) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = list
}

func (r *running) Running() []container.Container {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.list
}

func (r *running) Lookup(id container.ID) (container.Container, bool) {
	for _, c := range r.Running() {
		if c.ID == id {
			return c, true
		}
	}
	return container.Container{}, false
}

// booked returns an account.
func (h *host) booked(account string) (api.Volume, error) {
	h.t.Helper()
	got, err := h.traffic.Report(h.t.Context(), nil, api.Ask{Body: api.VolumesAsk{Of: account}})
	if err != nil {
		return api.Volume{}, err
	}
	return got.(api.Volumes).Accounts[0], nil
}

// kernel returns what the kernel has counted for the container behind a host end.
func (h *host) kernel(dev string) api.VolumeBytes {
	h.t.Helper()
	c, err := h.Open(h.ns).Counters(h.Index(h.ns, dev))
	must(h.t, err)
	return api.VolumeBytes{Sent: c.RxBytes, Received: c.TxBytes}
}

// books waits until an account has what the kernel has counted at a host end since was, to the byte.
// Protocols of the network may send meanwhile.
func (h *host) books(what, account, dev string, plus api.VolumeBytes) {
	h.t.Helper()
	until(h.t, what, func() (string, bool) {
		v, err := h.booked(account)
		want := h.kernel(dev)
		want.Sent, want.Received = want.Sent+plus.Sent, want.Received+plus.Received
		return fmt.Sprintf("%+v (%v), want %+v", v, err, want), err == nil && v.Total == want && v.Month == want
	})
}

// A container's account has what the kernel has counted, to the byte: over kills of the agent, new
// devices, and containers of the same name.
func TestVolumes(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	h := newHost(t, gbit)
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	c.Source = "docker"
	h.containers, h.volumes = &running{}, filepath.Join(t.TempDir(), "volumes.json")
	const to = "10.66.0.1:9000"
	h.resolve(box, h.wire, to)
	old := h.kernel("hone") // from before the first agent
	h.containers.set(c)
	h.start()
	less := func(a api.VolumeBytes) api.VolumeBytes { return api.VolumeBytes{Sent: -a.Sent, Received: -a.Received} }
	// What the first look took for old.
	var base api.VolumeBytes
	until(t, "the account", func() (string, bool) {
		was := h.kernel("hone")
		v, err := h.booked("docker/one")
		base = api.VolumeBytes{Sent: was.Sent - v.Total.Sent, Received: was.Received - v.Total.Received}
		return fmt.Sprint(v, err), err == nil && v.Container == api.ID(c.ID) && was == h.kernel("hone")
	})
	if base.Sent < old.Sent || base.Received < old.Received {
		t.Errorf("%+v are not counted, and the kernel had counted %+v before", base, old)
	}
	sent := h.send(box, to)
	h.books("what it sent", "docker/one", "hone", less(base))
	if v, err := h.booked("docker/one"); err != nil || v.Total.Sent < sent*100 || len(v.Days) != 1 || v.Days[0].VolumeBytes != v.Day {
		t.Errorf("%+v (%v), want more than %d datagrams of 100 bytes", v, err, sent)
	}

	// Killed: the file is as it was some time before the end.
	written, err := os.ReadFile(h.volumes)
	must(t, err)
	h.send(box, to)
	must(t, errors.Join(h.traffic.Close(), h.journal.Close(), os.WriteFile(h.volumes, written, 0o600)))
	h.send(box, to) // without an agent
	h.start()
	h.books("after a kill", "docker/one", "hone", less(base))

	// The container is made anew while an agent runs, and counts from its first byte. Of the old
	// one's end, which the agent was told of, nothing is lost.
	must(t, h.traffic.Apply(t.Context(), policy.Target{Container: c}))
	h.send(box, to)
	must(t, box.Change("eth0", (*netlink.Handle).LinkSetDown))
	last := h.kernel("hone")
	must(t, box.Destroy())
	h.containers.set()
	must(t, h.ns.Delete("hone")) // its namespace lives on, as the test has it open
	box, c = h.add("one", "10.66.0.2/24", h.ns)
	c.Source = "docker"
	h.resolve(box, h.wire, to)
	h.containers.set(c)
	must(t, h.traffic.Apply(t.Context(), policy.Target{Container: c}))
	h.books("made anew", "docker/one", "hone", api.VolumeBytes{Sent: last.Sent - base.Sent, Received: last.Received - base.Received})

	// Its volume is used up, and the account is the one of the earlier container.
	v, err := h.booked("docker/one")
	must(t, err)
	limit := policy.Volume{Bytes: v.Total.Sent, Per: policy.Monthly, Of: policy.OnlySent, After: mbit}
	target := policy.Target{Container: c, Settings: policy.Settings{Volume: limit}}
	must(t, h.traffic.Apply(t.Context(), target))
	ds, err := h.traffic.Decide([]policy.Target{target}, true)
	must(t, err)
	target, err = target.With(ds, time.Now())
	if err != nil || target.Settings.Egress.Ceil != mbit {
		t.Fatalf("decided: %+v (%v)", ds, err)
	}
	if err := h.traffic.Apply(t.Context(), target); err != nil && !errors.Is(err, feature.ErrPartly) { // partly before 6.6
		t.Fatal(err)
	}
	if got := h.classesOf(h.ns, "nic0")[h.minor(c)].ceil; got != mbit {
		t.Errorf("the ceil is %d", got)
	}
	must(t, h.traffic.Remove(t.Context(), c.ID))
}

// What is not counted is said.
func TestUncounted(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	h := newHost(t, gbit)
	h.containers, h.volumes = &running{}, filepath.Join(t.TempDir(), "volumes.json")
	h.start()
	c := fake(1)
	c.Source = "docker"
	volume := policy.Settings{Volume: policy.Volume{Bytes: 1e9, Per: policy.Daily}}
	says := func(what string, c container.Container, s policy.Settings, partly bool, text string) {
		t.Helper()
		err := h.traffic.Apply(t.Context(), policy.Target{Container: c, Settings: s})
		if err == nil || errors.Is(err, feature.ErrPartly) != partly || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want %q, partly %v", what, err, text, partly)
		}
	}
	says("in the host's network", c, volume, false, "no device of its own")
	weighed := volume
	weighed.Egress.Weight = 2
	says("in the host's network, with a weight", c, weighed, true, "no device of its own")
	bare := c
	bare.HostNetwork, bare.Source, bare.NetNS = false, container.CgroupSource, 1
	says("without a name", bare, volume, false, "no account")
	inner := c
	inner.HostNetwork, inner.NetNS = false, 1
	inner.Interfaces = []container.Interface{{Name: "dummy0", Kind: "dummy"}}
	says("with devices that lead nowhere", inner, volume, false, "nothing is counted")
	inner.Interfaces = append(inner.Interfaces, container.Interface{Name: "vf0", Kind: "device"},
		container.Interface{Name: "eth0", Kind: "veth", Host: container.HostEnd{NetNS: 1, Index: 1, Trusted: true}})
	says("with hardware", inner, volume, true, "vf0 (device)")
	must(t, h.traffic.Remove(t.Context(), c.ID))
}
