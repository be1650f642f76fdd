package probe

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// perPacket are the nftables expressions, and the matches and targets of iptables-nft, that act on
// each packet of a connection, not only on its first.
var perPacket = []string{"hashlimit", "limit", "connbytes", "quota", "nfacct", "NFQUEUE", "queue", "TEE", "dup", "objref", "ct bytes"}

// rules reports the firewall rules of our network namespace that the overlay's fast path would
// bypass. It does not see the rules of iptables-legacy, which have no dump.
func rules() answer {
	c := crowd{}
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_UNSPEC})
	err := req.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(msg []byte) bool {
		place, names := ruleOf(msg)
		for _, name := range names {
			if !slices.Contains(c[name], place) {
				c.add(name, place)
			}
		}
		return true
	})
	switch {
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return full("this kernel has no nftables")
	case err != nil && !errors.Is(err, nl.ErrDumpInterrupted):
		return refused(fmt.Errorf("list firewall rules: %w", err), "")
	}
	return c.answer("firewall rules here count, limit or queue each packet, and do not see those of overlay=on", "leave overlay off for the containers that these rules are for")
}

// ruleOf returns the place (table/chain) of the rule in an answer to NFT_MSG_GETRULE, and its parts
// in perPacket. Rules for address translation see only the first packet of a connection.
func ruleOf(msg []byte) (place string, names []string) {
	if len(msg) < nl.SizeofNfgenmsg {
		return "", nil
	}
	rule := attributes(msg[nl.SizeofNfgenmsg:])
	table := unix.ByteSliceToString(rule[unix.NFTA_RULE_TABLE])
	if table == "nat" {
		return "", nil
	}
	netdev.EachAttr(rule[unix.NFTA_RULE_EXPRESSIONS], func(_ uint16, e []byte) error {
		if name := expression(e); slices.Contains(perPacket, name) {
			names = append(names, name)
		}
		return nil
	})
	return table + "/" + unix.ByteSliceToString(rule[unix.NFTA_RULE_CHAIN]), names
}

// expression returns the name of an expression: the name of a match or target, the name of the
// expression that a dynamic set has for each element, or "ct bytes".
func expression(e []byte) string {
	of := attributes(e)
	name, data := unix.ByteSliceToString(of[unix.NFTA_EXPR_NAME]), attributes(of[unix.NFTA_EXPR_DATA])
	switch key := data[unix.NFTA_CT_KEY]; name {
	case "match", "target":
		return unix.ByteSliceToString(data[unix.NFTA_MATCH_NAME])
	case "dynset":
		return unix.ByteSliceToString(attributes(data[unix.NFTA_DYNSET_EXPR])[unix.NFTA_EXPR_NAME])
	case "ct":
		if len(key) == 4 && key[3] >= unix.NFT_CT_PKTS && key[3] <= unix.NFT_CT_AVGPKT {
			return "ct bytes"
		}
	}
	return name
}

// attributes returns the attributes of a message by type, up to a malformed one.
func attributes(b []byte) map[uint16][]byte {
	m := make(map[uint16][]byte)
	netdev.EachAttr(b, func(typ uint16, value []byte) error {
		m[typ] = value
		return nil
	})
	return m
}
