package traffic

import (
	"context"
	"errors"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// Prune implements feature.Feature. It undoes what an earlier agent left at the uplinks and Apply
// has not adopted.
func (f *Traffic) Prune(context.Context, func(container.ID) bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.tenants) == 0 {
		return f.restore(all)
	}
	held := make(map[journal.Ref]bool)
	for _, u := range f.uplinks {
		refs := []journal.Ref{qdisc.ForwardPriority(f.host).Ref()}
		if u.claimed {
			refs = append(refs, u.knobs(f.host)...)
		}
		if u.ingress.index != 0 {
			refs = append(refs, append(u.ingress.knobs(f.host), f.host.IFB(u.index).Ref())...)
		}
		for _, r := range refs {
			held[r] = true
		}
	}
	// The agent and Apply undo the entries of a single container.
	return f.restore(func(e journal.Entry) bool {
		if e.Ref.Kind == qdisc.KindFilter {
			return f.cfg.Ends.Stray(e)
		}
		return e.Owner.Container == 0 && !held[e.Ref]
	})
}

// Close implements feature.Feature. The qdiscs stay; without the programs, all packets are in the
// default class.
func (f *Traffic) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	for _, t := range f.tenants {
		errs = append(errs, t.close())
	}
	for _, u := range f.uplinks {
		errs = append(errs, u.close())
	}
	clear(f.tenants)
	clear(f.member)
	clear(f.uplinks)
	errs = append(errs, f.unwatch(), f.unfollow())
	if f.programs != nil {
		errs = append(errs, f.programs.close())
		f.programs = nil
	}
	errs = append(errs, f.own.Close())
	if f.host != nil {
		close(f.done)
		errs = append(errs, f.listing.Close(), f.host.Close())
		f.host = nil
	}
	return errors.Join(errs...)
}
