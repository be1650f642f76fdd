package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/api"
)

// classOf returns the class of a container at an uplink, for what it sends.
func (a *agent) classOf(name, uplink string) (api.TrafficClass, error) {
	t, err := a.api.Traffic(a.t.Context(), name, 0)
	if err != nil {
		return api.TrafficClass{}, err
	}
	for _, c := range t.Classes {
		if c.Uplink == uplink && c.Direction == "egress" {
			return c, nil
		}
	}
	return api.TrafficClass{}, fmt.Errorf("no class of %s at %s: %+v", name, uplink, t.Classes)
}

// counts waits until a class has counted n packets more than in was.
func (a *agent) counts(was api.TrafficClass, name string, packets uint64) {
	a.t.Helper()
	await(a.t, fmt.Sprintf("%d packets of %s to be in its class", packets, name), func() error {
		c, err := a.classOf(name, was.Uplink)
		if err == nil && c.Packets < was.Packets+packets {
			err = fmt.Errorf("there were %d, and are %d", was.Packets, c.Packets)
		}
		return err
	})
}

// testTraffic shapes Docker's own containers, by their labels at the start and by changes while
// they run.
func (h *host) testTraffic(t *testing.T) {
	defer h.with(t)()
	u := newUplink(t, h.NS.Path)
	before := u.shown()
	is := func(name string, guaranteed, ceil uint64) (c api.TrafficClass) {
		t.Helper()
		await(t, "the class of "+name, func() (err error) {
			if c, err = h.agent.classOf(name, "nic0"); err == nil && (c.Guaranteed != guaranteed || c.Ceil != ceil) {
				err = fmt.Errorf("it is %+v", c)
			}
			return err
		})
		return c
	}
	const mbit = 1_000_000
	h.sleeper(t, "capped", "--label", "fairlead.net.ceil=50mbit")
	await(t, "the ceil of capped, at its own devices alone", func() error {
		all, err := h.agent.api.Traffic(t.Context(), "capped", 0)
		if err == nil && (len(all.Classes) != 1 || all.Classes[0].Ceil != 50*mbit || u.shown() != before) {
			err = fmt.Errorf("classes %+v\n%swas\n%s", all.Classes, u.shown(), before)
		}
		return err
	})
	h.remove(t, "capped")
	h.sleeper(t, "rated", "--label", "fairlead.net.rate=50mbit", "--label", "fairlead.net.ceil=200mbit")
	h.sleeper(t, "weighed", "--label", "fairlead.net.weight=3")
	h.sleeper(t, "hosted", "--network", "host", "--label", "fairlead.net.weight=1")
	is("rated", 50*mbit, 200*mbit)
	is("weighed", 900*mbit/5*3, 1000*mbit) // all others together have weight 1
	is("hosted", 900*mbit/5, 1000*mbit)
	for _, name := range []string{"rated", "weighed", "hosted"} {
		was, err := h.agent.classOf(name, "nic0")
		must(t, err)
		if out, err := h.Run("exec", name, "ping", "-c", "20", "-i", "0.02", "-W", "5", "10.213.255.1"); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
		h.agent.counts(was, name, 20)
	}

	// While no agent runs, one container is created again with other labels, and one goes.
	h.agent.kill()
	h.remove(t, "rated", "hosted")
	h.sleeper(t, "rated", "--label", "fairlead.net.rate=150mbit")
	h.agent.start() // the final check compares with the first agent's start
	is("rated", 150*mbit, 1000*mbit)
	is("weighed", 600*mbit, 1000*mbit)
	await(t, "two classes, and everybody's", func() error {
		all, err := h.agent.api.Traffic(t.Context(), "", 0)
		if err == nil && strings.Count(fmt.Sprint(classNames(all)), "nic0") != 3 {
			err = fmt.Errorf("they are %v", classNames(all))
		}
		return err
	})
	h.remove(t, "rated", "weighed")
	await(t, "the uplink to be as it was", func() error {
		if got := u.shown(); got != before {
			return fmt.Errorf("it is\n%swas\n%s", got, before)
		}
		return nil
	})
	h.agent.rests()
}

// heldRuntime is runc, but does not execute the program while a certain file exists beside it.
const heldRuntime = `#!/bin/sh
case " $* " in *" start "*) while [ -e "$0.hold" ]; do sleep 0.01; done ;; esac
exec runc "$@"
`

// testBegins checks that limits are in force before the container's program is executed, and stay so.
func (h *host) testBegins(t *testing.T, held string) {
	defer h.with(t)()
	must(t, os.WriteFile(held+".hold", nil, 0o600))
	ran := make(chan error, 1)
	go func() {
		_, err := h.Run("run", "-d", "--name", "held", "--runtime", "held", "--label", "fairlead.netcpu=isolate", "--label", "fairlead.net.ingress.ceil=15mbit", h.Image, "sleep", "1000")
		ran <- err
	}()
	inForce := func() (c api.Container) {
		await(t, "held to be isolated, with its ceil in force", func() (err error) {
			if c, err = h.agent.find("held"); err != nil {
				return err
			}
			for _, f := range c.Features {
				if set := f.Feature == "netcpu" || f.Feature == "traffic"; set && f.State != api.StateDone {
					return fmt.Errorf("%+v", f)
				}
			}
			got, err := h.agent.api.Traffic(t.Context(), "held", 0)
			if err == nil && (len(got.Classes) != 1 || got.Classes[0].Direction != "ingress" || got.Classes[0].Ceil != 15_000_000) {
				err = fmt.Errorf("classes %+v", got.Classes)
			}
			return err
		})
		return c
	}
	before := inForce()
	if got := h.Must(t, "ps", "-a", "--filter", "name=held", "--format", "{{.State}}"); got != "created" || len(ran) > 0 {
		t.Errorf("its state is %s: the program runs", got)
	}
	must(t, os.Remove(held+".hold"))
	must(t, <-ran)
	h.sleeper(t, "next") // its start is news after that of held
	h.agent.stands("next", "netcpu", api.StateDone)
	if diff := cmp.Diff(before, inForce()); diff != "" {
		t.Errorf("the start changed (-before +after):\n%s", diff)
	}
	h.remove(t, "held", "next")
}

func classNames(t api.Traffic) (names []string) {
	for _, c := range t.Classes {
		names = append(names, c.Name+"@"+c.Uplink)
	}
	return names
}
