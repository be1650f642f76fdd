package rig

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// Recipe is the cache in front of an overlay network as the paper describes it (ONCache, NSDI
// 2025), on both hosts; see recipe.bpf.c. It serves only for comparison.
type Recipe struct {
	overlay *Overlay
	objects []*bpf.Object
	links   bpf.Links
}

// recipeRules mark packets of established connections that a cache has missed.
const recipeRules = `
table ip flrecipe {
	chain forward {
		type filter hook forward priority filter + 10;
		ct state established ip dscp 1 ip dscp set 3
	}
}
`

// AttachRecipe puts the cache in front of an overlay on the path Routed. It needs tcx (Linux 6.6).
// The caller closes it before the overlay. TCP connections that have used it do not survive that:
// connection tracking has missed their packets, and treats later ones as invalid.
func (o *Overlay) AttachRecipe(ctx context.Context) (_ *Recipe, err error) {
	c := &Recipe{overlay: o}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("attach recipe: %w", err), c.Close())
		}
	}()
	if o.Path != Routed {
		return nil, fmt.Errorf("it does not fit the path %s", o.Path)
	}
	for host, r := range o.Hosts {
		if err := r.nft(ctx, recipeRules); err != nil {
			return nil, err
		}
		if err := c.attach(host, r); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// attach loads the programs and maps of one host.
func (c *Recipe) attach(host int, r *Rig) error {
	object, err := bpf.Open("recipe", loadRecipe, bpf.Vars{recipeVarFlPort: uint16(routedPort)}, nil)
	if err != nil {
		return err
	}
	c.objects = append(c.objects, object)
	var objs struct {
		Local  *ebpf.Map     `ebpf:"fl_rcp_local"`
		Send   *ebpf.Program `ebpf:"fl_rcp_egress"`
		LearnE *ebpf.Program `ebpf:"fl_rcp_learn_e"`
		Get    *ebpf.Program `ebpf:"fl_rcp_ingress"`
		LearnI *ebpf.Program `ebpf:"fl_rcp_learn_i"`
	}
	if err := object.Load(&objs, nil); err != nil {
		return err
	}
	port := PortPrefix + r.Containers[0].Name
	end, err := indexOf(r.Node, port)
	if err != nil {
		return err
	}
	addr := netip.MustParseAddr(c.overlay.Addr(host)).As4()
	if err := objs.Local.Put(addr, recipeLocal{Ifindex: uint32(end)}); err != nil {
		return err
	}
	for _, at := range []struct {
		box     *sandbox.Box
		dev     string
		attach  ebpf.AttachType
		program *ebpf.Program
	}{
		{r.Boxes[0], "eth0", ebpf.AttachTCXIngress, objs.LearnI},
		{r.Node, NICDevice, ebpf.AttachTCXEgress, objs.LearnE},
		{r.Node, NICDevice, ebpf.AttachTCXIngress, objs.Get},
		{r.Node, port, ebpf.AttachTCXIngress, objs.Send},
	} {
		index, err := indexOf(at.box, at.dev)
		if err != nil {
			return err
		}
		err = at.box.Do(func() error {
			l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: at.program, Attach: at.attach})
			if err == nil {
				c.links = append(c.links, l)
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", at.dev, err)
		}
	}
	return nil
}

// indexOf returns the index of a device.
func indexOf(box *sandbox.Box, dev string) (index int, err error) {
	err = box.Change(dev, func(_ *netlink.Handle, link netlink.Link) error {
		index = link.Attrs().Index
		return nil
	})
	return index, err
}

// Flows returns how many flows a host's programs have seen in both directions: these take the short
// path.
func (c *Recipe) Flows(host int) (n int, err error) {
	var key recipeFlow
	var seen recipeSeen
	each := c.objects[host].Map(recipeMapFlRcpFlow).Iterate()
	for each.Next(&key, &seen) {
		if seen.In != 0 && seen.Out != 0 {
			n++
		}
	}
	return n, each.Err()
}

// Close removes the cache.
func (c *Recipe) Close() error {
	errs := []error{c.links.Close()}
	for _, o := range c.objects {
		errs = append(errs, o.Close())
	}
	for host := range c.objects {
		errs = append(errs, c.overlay.Hosts[host].nft(context.Background(), "delete table ip flrecipe"))
	}
	c.links, c.objects = nil, nil
	return errors.Join(errs...)
}
