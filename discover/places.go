package discover

import (
	"context"
	"errors"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
)

// ContainerdAddrs lists the sockets of containerd, by itself and as a part of k3s and RKE2, of
// MicroK8s and of k0s. A host can have several of them.
func ContainerdAddrs() []string {
	return []string{
		"/run/containerd/containerd.sock",
		"/run/k3s/containerd/containerd.sock",
		"/var/snap/microk8s/common/run/containerd.sock",
		"/run/k0s/containerd.sock",
	}
}

// places is one source for a runtime that may listen in several places.
type places []Source

func (p places) Name() string { return p[0].Name() }

func (p places) Run(ctx context.Context, publish func(Report)) error {
	var mu sync.Mutex
	last := make([]*Report, len(p))
	g, ctx := errgroup.WithContext(ctx)
	for i, s := range p {
		g.Go(func() error {
			return contained(func() error {
				return s.Run(ctx, func(rep Report) {
					mu.Lock()
					defer mu.Unlock()
					if rep.Err != nil && !rep.Partial && last[i] != nil {
						rep.Records = last[i].Records
					}
					last[i] = &rep
					publish(together(last))
				})
			})
		})
	}
	return g.Wait()
}

// together joins the last reports of several places; nil is a pending one.
func together(reports []*Report) Report {
	all, unknown := Report{Absent: true}, 0
	var errs []error
	for _, rep := range reports {
		if rep == nil {
			all.Partial, all.Absent = true, false
			continue
		}
		all.Records, all.Created = append(all.Records, rep.Records...), append(all.Created, rep.Created...)
		all.Absent = all.Absent && rep.Absent
		all.Partial = all.Partial || rep.Partial && !rep.Absent
		if rep.Err != nil {
			errs = append(errs, rep.Err)
			if !rep.Partial {
				unknown++
			}
		}
	}
	all.Partial = all.Partial || all.Absent || unknown > 0
	all.Err = errors.Join(slices.Clip(errs)...)
	return all
}
