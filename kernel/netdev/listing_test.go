package netdev

import (
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// The kernel is asked once for each change, however often the list is wanted, and what
// was changed before a call is in what it returns.
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
	// One for each device, one for each address, and the first.
	if l.lists != 41 {
		t.Errorf("the kernel was asked %d times", l.lists)
	}
}
