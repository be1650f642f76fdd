package e2e

import (
	"fmt"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// testVolume has the account of a container counted over a restart of the container and a kill of
// the agent, to the byte, and its ceil follow from it.
func (h *host) testVolume(t *testing.T) {
	defer h.with(t)()
	ns, err := netdev.Open(h.NS.Path)
	must(t, err)
	defer ns.Close()
	ping := func(n string) {
		t.Helper()
		h.Must(t, "exec", "metered", "ping", "-c", n, "-i", "0.02", "-s", "1400", "-W", "5", "10.213.255.1")
	}
	// counted is what the kernel has counted at the host end of the container that runs.
	counted := func() (c netdev.Counters) {
		t.Helper()
		await(t, "the host end of metered", func() error {
			found, err := h.agent.find("metered")
			if err != nil {
				return err
			}
			for _, i := range found.Interfaces {
				if i.Host != nil {
					c, err = ns.Counters(i.Host.Index)
					return err
				}
			}
			return fmt.Errorf("it has none: %+v", found.Interfaces)
		})
		return c
	}
	// has waits until the account has what was counted, beside what was before, which may have been a
	// little more.
	has := func(what string, before netdev.Counters, more uint64) api.Volume {
		t.Helper()
		var v api.Volume
		await(t, what, func() error {
			all, err := h.agent.api.Volumes(t.Context(), "metered")
			if err != nil {
				return err
			}
			v = all.Accounts[0]
			c := counted()
			want := api.VolumeBytes{Sent: before.RxBytes + c.RxBytes, Received: before.TxBytes + c.TxBytes}
			if v.Total.Sent-want.Sent > more || v.Total.Received-want.Received > more { // unsigned: nor less
				return fmt.Errorf("%+v, want %+v, or %d more", v, want, more)
			}
			return nil
		})
		return v
	}
	h.sleeper(t, "metered", "--label", "fairlead.net.volume=1mb/day sent", "--label", "fairlead.net.volume.after=1mbit")
	ping("20")
	has("what it sent and received", netdev.Counters{}, 0)

	h.agent.kill()
	ping("20")
	h.agent.start()
	has("after a kill of the agent", netdev.Counters{}, 0)

	// The engine stops the container in its network, so that its last bytes are told.
	last := counted()
	h.Must(t, "restart", "-t", "0", "metered")
	await(t, "the new device of metered", func() error {
		all, err := h.agent.api.Volumes(t.Context(), "metered")
		if err == nil && (all.Accounts[0].Container == 0 || len(all.Accounts[0].Limits) != 1) {
			err = fmt.Errorf("%+v", all)
		}
		return err
	})
	ping("20")
	v := has("after a restart of the container", last, 4096)
	if v.Account != "docker/metered" || v.Limits[0].Bytes != 1e6 || v.Limits[0].Used != v.Total.Sent {
		t.Errorf("%+v", v)
	}

	// 1 MB and more.
	ping("700")
	await(t, "its ceil", func() error {
		e, err := h.agent.api.Explain(t.Context(), "metered")
		if err != nil {
			return err
		}
		for _, o := range e.Container.Policy {
			if o.Key == "fairlead.net.ceil" && o.Value == "1mbit" {
				return nil
			}
		}
		return fmt.Errorf("%+v", e.Container.Policy)
	})
	mustSay(t, h.agent.run("explain", "metered"), 0, "its volume of 1mb/day sent is used up until")
	mustSay(t, h.agent.run("traffic", "volume", "metered"), 0, "docker/metered", "1mb/day sent, then 1mbit")
	h.remove(t, "metered")
	h.agent.idles(h.atStart)
}
