package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// State is how a namespace tracks connections.
type State struct {
	Entries int  // in the table; 0 where nothing is tracked
	Liberal bool // TCP packets outside of the window are valid (net.netfilter.nf_conntrack_tcp_be_liberal)
}

// Read reads the State of a namespace. A kernel without conntrack has the zero State.
func Read(ns *netdev.NS) (s State, err error) {
	err = ns.Do(func() error {
		// /proc/sys/net shows the namespace of the opening thread.
		if s.Entries, err = number("nf_conntrack_count"); err != nil {
			return err
		}
		liberal, err := number("nf_conntrack_tcp_be_liberal")
		s.Liberal = liberal != 0
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, nil
	}
	if err != nil {
		return State{}, fmt.Errorf("read conntrack of netns %d: %w", ns.Inode(), err)
	}
	return s, nil
}

func number(name string) (int, error) {
	b, err := os.ReadFile("/proc/sys/net/netfilter/" + name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}
