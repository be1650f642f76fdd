package drop

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// A full map is an error for the caller, and changes nothing for others.
func TestEarlyDropFullMaps(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	a, b := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, a, "h0", b, "eth0")
	inside, host := openNS(t, b.Path), openNS(t, a.Path)
	c := container.Container{ID: 1, NetNS: another(e).NetNS}
	c.Interfaces = []container.Interface{{Kind: "veth", Index: 2, Host: container.HostEnd{NetNS: host.Inode(), NSPath: a.Path, Index: 2}}}
	w, err := e.add(c.TenantKey(), c.ID)
	must(t, err)
	for i := range e.maps.FlTenants.MaxEntries() {
		if _, err := e.cfg.Identity.Take(identity.Tenant{NetNS: 1<<40 + uint64(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := e.add(another(e), 1); !errors.Is(err, errSlots) {
		t.Errorf("add with no slot left: %v, want errSlots", err)
	}
	key := func(i uint32) []byte {
		return binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, 1), i)
	}
	for i := range e.maps.FlCounted.MaxEntries() {
		must(t, e.maps.FlCounted.Put(key(i), uint32(1)))
	}
	if err := w.countVeths(inside, c); err == nil {
		t.Error("device with a full map: no error")
	}
	if w.counts.Len() != 0 {
		t.Error("after the error the device counts as watched")
	}
	must(t, e.maps.FlCounted.Delete(key(0)))
	if err := w.countVeths(inside, c); err != nil || w.counts.Len() != 1 {
		t.Errorf("device once there is room: %v", err)
	}
}
