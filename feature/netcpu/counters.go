package netcpu

import "github.com/fairlead-project/fairlead/kernel/netdev"

// counts returns what the kernel counts at the devices of a network namespace, by index. Account
// calls it each second, mostly for the host's namespace, and one call at a time.
func (n *Netcpu) counts(netns uint64) (counts map[int]netdev.Counters, err error) {
	if netns == n.hostNS && n.counting != nil {
		if counts, err = n.counting.Read(netdev.MostLinks); err == nil {
			return counts, nil
		}
		n.counting.Close()
		n.counting = nil
	}
	ns, err := n.find.Open("", netns)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	if netns == n.hostNS { // other namespaces may be about to end, which an open socket delays
		if n.counting, err = ns.Counting(); err != nil {
			return nil, err
		}
		return n.counting.Read(netdev.MostLinks)
	}
	return ns.AllCounters(netdev.MostLinks)
}
