package netdev

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// The kernel is asked once per change, for what has changed only, however often the list is read,
// and the list includes every change before the call.
func TestListing(t *testing.T) {
	made := testkit.NetNS(t)
	l, err := NewListing(made.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	names := func() map[string]Link {
		t.Helper()
		links, err := l.Links()
		if err != nil {
			t.Fatal(err)
		}
		list := make(map[string]Link)
		for _, link := range links {
			list[link.Name] = link
		}
		return list
	}
	names()
	h := made.Handle(t)
	for i := range 20 {
		name := fmt.Sprint("fl", i)
		if err := h.LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
			t.Fatal(err)
		}
		if _, ok := names()[name]; !ok {
			t.Errorf("%s is not in the list", name)
		}
		made.Address(t, name, fmt.Sprintf("10.1.%d.1/24", i))
		for range 10 {
			if got := names()[name].Addrs; len(got) != 1 {
				t.Errorf("%s has the addresses %v", name, got)
			}
		}
	}
	// Once for each device, and once for each address.
	if l.lists != 1 || l.asked != 40 {
		t.Errorf("the kernel was asked %d times for all devices, and %d times for one", l.lists, l.asked)
	}
	same := func(when string) {
		t.Helper()
		got, err := l.Links()
		ns, wantErr := Open(made.Path)
		if wantErr != nil {
			t.Fatal(wantErr)
		}
		defer ns.Close()
		want, wantErr := ns.Links(MostLinks)
		byIndex := cmpopts.SortSlices(func(a, b Link) bool { return a.Index < b.Index })
		if diff := cmp.Diff(want, got, byIndex); diff != "" || err != nil || wantErr != nil {
			t.Errorf("%s (-want +got):\n%s%v %v", when, diff, err, wantErr)
		}
	}
	same("made one by one")
	link, err := h.LinkByName("fl7")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(h.LinkSetName(link, "flnew"), h.LinkSetMTU(link, 1400)); err != nil {
		t.Fatal(err)
	}
	same("one is renamed")
	if err := h.LinkDel(link); err != nil {
		t.Fatal(err)
	}
	same("and removed")
	for i := range 100 {
		if err := h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprint("flv", i)}, PeerName: fmt.Sprint("flw", i)}); err != nil {
			t.Fatal(err)
		}
	}
	same("many at once")
	if l.lists != 2 {
		t.Errorf("the kernel was asked %d times for all devices", l.lists)
	}
}
