package traffic

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/policy"
)

// Longer names have no account: the file is bounded.
const maxAccount = 512

// claims lists the devices that are counted, by the inode of their namespace.
func (v *volumes) claims(running []container.Container) map[uint64][]claim {
	tenants := make(map[container.TenantKey][]container.Container)
	for _, c := range running {
		if key := c.TenantKey(); key.NetNS != 0 {
			tenants[key] = append(tenants[key], c)
		}
	}
	clear(v.accounts)
	since := v.now().Add(v.ledger.Since() - uptime())
	claims := make(map[uint64][]claim)
	taken := make(map[container.Device]bool)
	for _, members := range tenants {
		account := accountOf(members)
		if account == "" {
			continue
		}
		fresh := true
		for _, c := range members {
			fresh = fresh && c.Started.After(since)
			v.accounts[c.ID] = account
		}
		for _, c := range members {
			for _, e := range c.Ends(v.proc) {
				if countable(e) && !taken[e.Device] {
					taken[e.Device] = true
					claims[e.NetNS] = append(claims[e.NetNS], claim{e, account, fresh})
				}
			}
		}
	}
	return claims
}

// countable reports whether what passes an end is counted: the host end of a pair where no container
// can have made it, or a device on top of one outside.
func countable(e container.End) bool {
	return e.Host && e.Trusted || unseen(e.Inside.Kind) && e.Inside.Apart
}

// accountOf names the account of containers that share a network: of their pod, or of the one that
// was started first, which the others have joined. Only what their owner has chosen counts: the
// name, and not the labels, which an image may have too. It is "" if no runtime knows any of them.
func accountOf(members []container.Container) string {
	members = slices.Clone(members)
	slices.SortFunc(members, func(a, b container.Container) int {
		return cmp.Or(strings.Compare(b.Pod, a.Pod), a.Started.Compare(b.Started), strings.Compare(a.Name, b.Name))
	})
	for _, c := range members {
		name := c.Source + "/" + c.Name
		if c.Pod != "" {
			name = "pod/" + c.Namespace + "/" + c.Pod
		}
		if c.Source != container.CgroupSource && c.Source != "" && c.Name != "" && len(name) <= maxAccount {
			return name
		}
	}
	return ""
}

// uncounted returns an error for a container with a volume of which not everything is counted;
// feature.ErrPartly if something is.
func (v *volumes) uncounted(c container.Container, s policy.Settings) error {
	if s.Volume.Bytes == 0 {
		return nil
	}
	if v == nil {
		return errors.New("net.volume: this agent counts no volumes; possible with: the agent's flag --volumes")
	}
	if c.HostNetwork {
		return errors.New("net.volume: what the container sends is not counted, as it has no device of its own in the host's network; possible with: a network of its own")
	}
	if accountOf([]container.Container{c}) == "" {
		return errors.New("net.volume: there is no account for a container that no runtime knows by a name, of some 500 bytes at most")
	}
	var beside []string
	some := false
	for _, e := range c.Ends(v.proc) {
		switch {
		case countable(e):
			some = true
		case e.Inside.Kind == "device" || e.Inside.Apart:
			beside = append(beside, fmt.Sprintf("%s (%s)", e.Inside.Name, e.Inside.Kind))
		}
	}
	switch {
	case some && len(beside) > 0:
		return fmt.Errorf("%w: net.volume: what passes %s is not counted; possible with: a bridge network or a macvlan", feature.ErrPartly, strings.Join(beside, ", "))
	case !some && len(c.Interfaces) > 0:
		return errors.New("net.volume: nothing is counted, as no device of the container leads to a device of the host; possible with: a bridge network or a macvlan")
	}
	return nil
}
