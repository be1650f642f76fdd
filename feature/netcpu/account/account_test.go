package account

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/tenant/identity"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

func TestMain(m *testing.M) {
	topology.Reexec(reexecNested)
	testkit.Main(m)
}

// newMeter opens a Meter that is closed when t ends.
func newMeter(t testing.TB) *Meter {
	t.Helper()
	return openMeter(t, false)
}

func openMeter(t testing.TB, exact bool) *Meter {
	t.Helper()
	testkit.NeedRoot(t)
	cfg := config(t)
	if exact {
		cfg.exact = seconds()
	}
	m, err := Open(cfg)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { must(t, m.Close()) })
	return m
}

// seconds is how long an exact meter lets packets wait: longer on an emulated CPU, where
// ksoftirqd may get none for seconds.
func seconds() uint8 {
	if testing.Short() {
		return 15
	}
	return 4
}

func config(t testing.TB) Config {
	t.Helper()
	j := testkit.Journal(t, journal.Open)
	e := hook.Open("/proc", j)
	must(t, e.Err())
	return Config{Identity: newIdentity(t), Ends: e}
}

func newIdentity(t testing.TB) *identity.Identity {
	t.Helper()
	who := testkit.Opened(identity.Open("/proc"))(t)
	return who
}

var must = testkit.Must

// A tenant has an account from Watch until the Reading without it.
func TestLife(t *testing.T) {
	m := newMeter(t)
	told := identity.Member{ID: 5, Cgroups: []uint64{7}}
	for range 2 {
		must(t, m.Watch(told))
	}
	slot, ok := m.Slot(5)
	if !ok || slot == 0 {
		t.Fatalf("slot %d, %v", slot, ok)
	}
	if _, ok := m.Slot(6); ok {
		t.Error("a container that is not watched has a slot")
	}
	var charge int64
	must(t, m.Charges().Lookup(slot, &charge))
	work := make([]accountAccount, ebpf.MustPossibleCPU())
	work[0].By[UDP].Ns = 1000
	must(t, m.maps.FlAccounts.Put(slot, work))
	theft := accountTheft{Culprit: uint16(slot), Kind: uint16(Idle)}
	must(t, m.maps.FlThefts.Put(theft, make([]uint64, len(work))))

	for range 2 { // the second time it is unknown, which is no error
		must(t, m.Forget(5))
	}
	if _, ok := m.Slot(5); ok {
		t.Error("a forgotten container has a slot")
	}
	must(t, m.Watch(identity.Member{ID: 6}))
	if other, _ := m.Slot(6); other == slot {
		t.Error("a slot is used again before its numbers were read")
	}
	for _, c := range []struct {
		tombstone bool
		gone      time.Duration
		thefts    int
	}{{true, 0, 1}, {false, 1000, 0}, {false, 1000, 0}} {
		r, err := m.Read()
		must(t, err)
		a, tombstone := r.Accounts[5]
		_, theft := r.Thefts[Pair{Party{Kind: Idle}, 5}]
		if tombstone != c.tombstone || theft != (c.thefts > 0) || r.Gone != c.gone {
			t.Errorf("reading %+v, want %+v", r, c)
		}
		if tombstone && a.CPU() != 1000 {
			t.Errorf("tombstone %+v", a)
		}
	}
	must(t, m.Watch(told))
	if again, _ := m.Slot(5); again != slot {
		t.Errorf("slot %d, want %d, which is free", again, slot)
	}
	must(t, m.maps.FlAccounts.Lookup(slot, &work))
	if a, _ := sum(work); a.CPU() != 0 {
		t.Errorf("a slot that is used again begins with %+v", work)
	}
}

// Among several tenants in one namespace, the one with the highest rank owns the packets, and the
// first among equals.
func TestHolder(t *testing.T) {
	m := newMeter(t)
	m.cfg.Ends = nil // the devices do not exist
	const netns, host = 4026531000, 4026531001
	in := identity.Tenant{NetNS: netns}
	devices := []identity.Device{{Netns: netns, Ifindex: 2}, {Netns: host, Ifindex: 3, HostEnd: true}}
	var network identity.Slot // of the namespace
	watch := func(id container.ID, rank int) {
		t.Helper()
		must(t, m.Watch(identity.Member{ID: id, Tenant: in, Cgroups: []uint64{uint64(id)}, Devices: devices, Rank: rank}))
	}
	holds := func(when string, want container.ID) {
		t.Helper()
		got, ok := m.Holder(netns)
		slot, _ := m.Slot(want)
		if s := m.cfg.Identity.Lookup(in); s != identity.Nobody {
			network = s
		}
		var pays uint32
		must(t, m.maps.FlPayers.Lookup(uint32(network), &pays))
		if got != want || ok != (want != 0) || pays != slot {
			t.Errorf("%s: %v, %v has it, and slot %d pays, want %v with slot %d", when, got, ok, pays, want, slot)
		}
		for id := range container.ID(3) { // each has its own tasks
			var own uint32
			err := m.maps.FlContainers.Lookup(uint64(id), &own)
			if slot, ok := m.Slot(id); own != slot || ok == errors.Is(err, ebpf.ErrKeyNotExist) {
				t.Errorf("%s: tasks of %v are slot %d's, want %d; %v", when, id, own, slot, err)
			}
		}
	}
	holds("nobody", 0)
	watch(1, 0)
	watch(2, 0)
	holds("the first of two", 1)
	watch(2, 3)
	holds("the second is higher", 2)
	watch(1, 3)
	holds("equals again", 1)
	watch(1, 1)
	holds("the first is lower", 2)
	must(t, m.Forget(2))
	holds("the second has gone", 1)
	must(t, m.Forget(1))
	holds("both have", 0)
}

// A container that returns before it was reported keeps its account.
func TestRevive(t *testing.T) {
	m := newMeter(t)
	must(t, m.Watch(identity.Member{ID: 5}))
	slot, _ := m.Slot(5)
	must(t, m.Forget(5))
	_, err := m.Read()
	must(t, err)
	must(t, m.Watch(identity.Member{ID: 5}))
	if again, ok := m.Slot(5); !ok || again != slot {
		t.Errorf("slot %d, %v, want %d", again, ok, slot)
	}
	for range 3 {
		r, err := m.Read()
		must(t, err)
		if len(r.Accounts) != 2 || r.Gone != 0 {
			t.Errorf("reading %+v, want two accounts", r)
		}
	}
}

// A full map is an error for the caller that needed the room, and changes nothing for others.
func TestFull(t *testing.T) {
	m := newMeter(t)
	must(t, m.Watch(identity.Member{ID: 1}))
	for len(m.slots) < cap(m.slots) {
		t := &account{slot: uint32(len(m.slots)), member: identity.Member{ID: container.ID(1000 + len(m.slots))}}
		m.slots, m.accounts[t.member.ID] = append(m.slots, t), t
	}
	if err := m.Watch(identity.Member{ID: 2}); !errors.Is(err, ErrSlots) {
		t.Errorf("Watch without a slot: %v, want ErrSlots", err)
	}
	// The accounts are never read, and yet their slots are reused once containers have gone.
	must(t, m.Forget(1500))
	must(t, m.Watch(identity.Member{ID: 2}))
	if err := m.Watch(identity.Member{ID: 3}); !errors.Is(err, ErrSlots) {
		t.Errorf("Watch without a slot: %v, want ErrSlots", err)
	}
	for id := range m.accounts {
		if id != 1 {
			delete(m.accounts, id)
		}
	}
	m.slots = m.slots[:2]
	cgroups := make([]uint64, m.cfg.Identity.Maps()["fl_cgroups"].MaxEntries()+1)
	for i := range cgroups {
		cgroups[i] = uint64(i + 1)
	}
	err := m.Watch(identity.Member{ID: 1, Cgroups: cgroups})
	if err == nil || !strings.HasSuffix(err.Error(), "no room for 1 of 65537") {
		t.Errorf("more cgroups than the map holds: %v", err)
	}
	must(t, m.Watch(identity.Member{ID: 2, Cgroups: cgroups[len(cgroups)-1:]})) // only the last one has room
	must(t, m.Forget(2))
	must(t, m.Watch(identity.Member{ID: 1, Cgroups: cgroups[:5]}))
	if err := m.Watch(identity.Member{ID: 1, Tenant: identity.Tenant{NetNS: 2}, Devices: []identity.Device{{Netns: 1, Ifindex: 1, HostEnd: true}}}); err == nil {
		t.Error("a device in a namespace that is not there: no error")
	}
	must(t, m.Watch(identity.Member{ID: 1, Cgroups: cgroups[:5]}))
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(Config{Proc: dir}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Open without proc: %v", err)
	}
	version := "Linux version 6.12.1-rt (x) (gcc) #1 SMP PREEMPT_RT Debian 6.12.1"
	must(t, os.WriteFile(filepath.Join(dir, "version"), []byte(version), 0o644))
	if _, err := Open(Config{Proc: dir}); !errors.Is(err, errRealtime) {
		t.Errorf("Open on PREEMPT_RT: %v, want errRealtime", err)
	}
}
