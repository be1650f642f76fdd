package probe

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestRules(t *testing.T) {
	ns := testkit.NetNS(t)
	do := func(what string, args ...string) {
		t.Helper()
		must(t, ns.Do(func() error {
			cmd := exec.Command(args[0], args[1:]...)
			cmd.Stdin = strings.NewReader(what)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v: %s", args, out)
			}
			return err
		}))
	}
	look := func() (a answer) {
		must(t, ns.Do(func() error { a = rules(); return nil }))
		return a
	}
	if a := look(); a.Level != Full {
		t.Fatalf("in a new namespace: %+v", a)
	}
	do(`table ip harmless {
		chain forward { type filter hook forward priority 0; ct state established counter accept; tcp dport 80 drop; }
	}
	table ip nat { chain once { limit rate 5/second accept; }; }`, "nft", "-f", "-")
	if a := look(); a.Level != Full {
		t.Fatalf("rules that see no more than the first packet: %+v", a)
	}
	do(`table inet acct {
		counter sum { }
		set from { type ipv4_addr; flags dynamic; }
		chain forward { type filter hook forward priority 0; counter name sum; ct original bytes > 1000000 drop; add @from { ip saddr limit rate 1/second } accept; quota over 1 mbytes drop; }
	}`, "nft", "-f", "-")
	do("", "iptables-nft", "-A", "FORWARD", "-m", "hashlimit", "--hashlimit-above", "10/sec", "--hashlimit-name", "x", "-j", "DROP")
	const want = "ct bytes (acct/forward), hashlimit (filter/FORWARD), limit (acct/forward), objref (acct/forward), quota (acct/forward)"
	if a := look(); a.Level != Degraded || a.detail != want {
		t.Fatalf("%+v", a)
	}
}

func FuzzRule(f *testing.F) {
	attr := func(typ int, value []byte) []byte { return nl.NewRtAttr(typ, value).Serialize() }
	match := attr(unix.NFTA_LIST_ELEM, append(attr(unix.NFTA_EXPR_NAME, []byte("match\x00")), attr(unix.NFTA_EXPR_DATA, attr(unix.NFTA_MATCH_NAME, []byte("hashlimit\x00")))...))
	f.Add(append([]byte{2, 0, 0, 0}, append(attr(unix.NFTA_RULE_TABLE, []byte("filter\x00")), attr(unix.NFTA_RULE_EXPRESSIONS, match)...)...))
	f.Add([]byte{2, 0, 0})
	f.Fuzz(func(t *testing.T, msg []byte) {
		place, names := ruleOf(msg)
		if len(names) > 0 && (!strings.Contains(place, "/") || !strings.Contains(string(msg), strings.TrimSuffix(names[0], " bytes"))) {
			t.Fatalf("%q is %q of %q", msg, names, place)
		}
	})
}
