package netcpu_test

import (
	"errors"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// Every container has an account from its first Apply to its Remove, in any mode.
func TestAccounts(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, sandbox.CPU{})
	if _, err := h.netcpu.Read(); errors.Is(err, netcpu.ErrNoAccounts) {
		testkit.Skip(t, "kernel cannot keep accounts")
	}
	h.apply(h.container, "")
	h.start(h.box, "udp-recv")
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", "5000")

	h.untilAccount("observed", func(a account.Account) bool {
		w := a.Receive[account.UDP]
		return w.Packets > 500 && w.CPU > 0 && w.Bytes > 500*1000
	})
	h.apply(h.container, policy.NetCPUIsolate)
	own := h.untilAccount("isolated", func(a account.Account) bool { return a.Own > 0 }).Own
	h.apply(h.container, policy.NetCPUObserve)
	h.untilAccount("observed again", func(a account.Account) bool { return a.CPU() > own })

	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	if h.account() == nil {
		t.Error("the account went before it was read for the last time")
	}
	if a := h.account(); a != nil {
		t.Errorf("an account that has ended is still read: %+v", a)
	}
}

// account returns the container's account, nil if there is none.
func (h *host) account() *account.Account {
	h.t.Helper()
	r, err := h.netcpu.Read()
	must(h.t, err)
	for _, a := range r.Accounts {
		if a.Container == h.container.ID {
			return &a
		}
	}
	return nil
}

func (h *host) untilAccount(when string, ok func(account.Account) bool) account.Account {
	h.t.Helper()
	for end := time.Now().Add(90 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		a := h.account()
		if a == nil {
			h.t.Fatalf("%s: no account", when)
		}
		if ok(*a) {
			return *a
		}
		if time.Now().After(end) {
			h.t.Fatalf("%s: %+v", when, *a)
		}
	}
}
