package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Liberal reports whether a namespace accepts TCP packets outside the window as valid
// (net.netfilter.nf_conntrack_tcp_be_liberal). Without conntrack it reports false.
func Liberal(ns *netdev.NS) (liberal bool, err error) {
	err = ns.Do(func() error {
		// /proc/sys/net shows the namespace of the opening thread.
		b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
		liberal = err == nil && strings.TrimSpace(string(b)) != "0"
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("read conntrack of netns %d: %w", ns.Inode(), err)
	}
	return liberal, nil
}
