package netcpu

import "github.com/fairlead-project/fairlead/kernel/netdev"

// counts returns the kernel's counters of each device in a network namespace, by index. Package
// account calls it once a second, mostly for the host's namespace, and never concurrently.
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
	if netns == n.hostNS { // an open socket would keep any other namespace alive
		if n.counting, err = ns.Counting(); err != nil {
			return nil, err
		}
		return n.counting.Read(netdev.MostLinks)
	}
	return ns.AllCounters(netdev.MostLinks)
}
