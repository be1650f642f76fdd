package netcpu

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/charge"
	"github.com/fairlead-project/fairlead/feature/netcpu/isolate"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

// newCharger makes the charger. The dropper, if there is one, enforces its limits.
func (n *Netcpu) newCharger() *charge.Charger {
	credits, err := probe.SoftirqsChargeTasks(n.cfg.Roots)
	if err != nil {
		n.cfg.Log.Warn("giving nobody credit for others' packets", "feature", name, "err", err)
	}
	cfg := charge.Config{
		Feature: name, Roots: n.cfg.Roots, Layout: n.layout, Journal: n.cfg.Journal, Failed: n.failed("charging containers"),
		Accounts: n.meter.Accounts, Credits: credits,
	}
	if n.dropper != nil {
		cfg.Allow = n.dropper.Allow
	}
	return charge.New(cfg)
}

// charge makes a container's quota or weight follow its account. in is its tenant, or nil if its
// network namespace is unknown.
func (n *Netcpu) charge(ctx context.Context, in *tenant.Tenant, t policy.Target) error {
	c := t.Container
	if !n.charger.Has(c.ID) {
		if err := n.unisolate(ctx, in, c.ID); err != nil {
			return err
		}
	}
	reserve := law.Least
	if r := t.Settings.NetCPUReserve; r != nil {
		reserve = *r
	}
	if err := n.charger.Add(c, reserve); err != nil {
		return err
	}
	return errors.Join(n.isolator.Extend(0), n.bringBudget(ctx, in))
}

// uncharge stops charging a container, if it is charged. of is its tenant, or nil.
func (n *Netcpu) uncharge(ctx context.Context, of *tenant.Tenant, id container.ID) error {
	if n.charger == nil || !n.charger.Has(id) {
		return nil
	}
	if err := n.charger.Remove(id); err != nil {
		return err
	}
	return errors.Join(isolate.IgnoreGone(n.bringBudget(ctx, of)), n.isolator.Extend(0))
}

// bringBudget switches early drop of a tenant on or off. It is on if the member that holds the
// account of the tenant's packets is charged. It leaves an isolated tenant alone, because its NAPI
// thread pays for its packets.
func (n *Netcpu) bringBudget(ctx context.Context, of *tenant.Tenant) error {
	if of == nil || n.meter == nil || n.isolator.Isolates(of) {
		return nil
	}
	c, charged := n.charged(of)
	if !charged {
		return errors.Join(n.dropper.End(of.Key()), n.dropper.Rest())
	}
	ns, err := n.find.Open(filepath.Join(n.cfg.Roots.Proc, strconv.Itoa(c.PID), "ns", "net"), of.Key().NetNS)
	if err != nil {
		return fmt.Errorf("netcpu charge: %w", err)
	}
	defer ns.Close()
	if _, err := n.dropper.Begin(ns, of, c, true); err != nil {
		return fmt.Errorf("netcpu charge: %w", err)
	}
	if err := errors.Join(n.dropper.Open(ctx, c), n.isolator.RenewUplinks(false)); err != nil {
		return fmt.Errorf("netcpu charge: %w", err)
	}
	return nil
}

// charged returns the member that is charged for a tenant's packets.
func (n *Netcpu) charged(of *tenant.Tenant) (c container.Container, ok bool) {
	id, ok := n.meter.Holder(of.Key().NetNS)
	if !ok || !n.charger.Has(id) {
		return c, false
	}
	for _, m := range of.Members() {
		if m.Container.ID == id {
			return m.Container, m.Settings.NetCPU == policy.NetCPUCharge
		}
	}
	return c, false
}
