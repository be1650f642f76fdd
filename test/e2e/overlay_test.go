package e2e

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// swarm is two nodes with an overlay network, an agent on each.
type swarm struct {
	t       *testing.T
	engines [2]*testkit.Docker
	agents  [2]*agent
	plain   [2]*overlaid // does not ask, and keeps the network on its node
	web     [2]*overlaid // asks
	inner   [2]uint64    // namespaces of the network
	host    [2]state     // the nodes' devices without a fast path,
	under   [2]state     // and the devices in the engine's namespaces
}

// swarmOverlay checks that packets of containers on two nodes become fast and stay correct,
// whatever happens to the agents and to the containers.
func swarmOverlay(t *testing.T, nodes [2]*testkit.Docker) {
	s := &swarm{t: t, engines: nodes}
	for n, d := range s.engines {
		s.agents[n] = newAgent(t, d.NS, "--docker-host", d.Host)
		s.agents[n].policy("overlay.yaml", "match: {name: [\"web*\", secret]}\nset: {overlay: on}\n")
		s.plain[n] = joined(t, s.agents[n], d, testkit.SwarmNetwork, "plain")
		s.start(n)
	}
	for n := range s.plain {
		s.off(n)
		s.host[n], s.under[n] = s.devices(n)
	}
	for n, d := range s.engines {
		s.web[n] = joined(t, s.agents[n], d, testkit.SwarmNetwork, fmt.Sprintf("web%d", n))
	}
	for _, c := range s.web { // a lone node has no uplink yet
		c.stands(c.name, "overlay", api.StateDone)
	}
	s.web[1].echo()
	var talks []*dialogue
	for _, proto := range []string{"udp", "tcp"} {
		d := dial(s.t, s.web[0].do, proto, s.web[1].addr+":9000")
		s.fast(d)
		talks = append(talks, d)
	}
	s.published()
	s.killed(talks)
	s.encrypted()
	s.removed()
}

// start starts an agent in a mount namespace where it sees the engine's mounts, as on any host.
func (s *swarm) start(n int) {
	s.t.Helper()
	s.agents[n].start("nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", s.engines[n].PID()))
}

// path leads to the engine's namespace of the network at a node.
func (s *swarm) path(n int) string { return s.find(s.inner[n]) }

func (s *swarm) find(inode uint64) string {
	s.t.Helper()
	path, err := netdev.NewGlance("/proc", nil).Find(inode)
	must(s.t, err)
	return path
}

// devices reads what might be changed on the devices of a node and of the network.
func (s *swarm) devices(n int) (host, under state) {
	s.t.Helper()
	host, under = devicesOf(s.t, s.engines[n].NS), state{}
	under.readDevices(s.t, "overlay", s.path(n))
	return host, under
}

// off checks what the agent reports on a network that no container asks for.
func (s *swarm) off(n int) {
	s.t.Helper()
	c := s.plain[n]
	await(s.t, "the network to be found", func() error {
		if o, err := c.api.Overlay(s.t.Context(), "plain", 0); err == nil && len(o.Networks) > 0 {
			s.inner[n] = o.Networks[0].NetNS
		}
		return says(c.run("overlay"), 0, "vxlan0@", "bridged", "flwire", "  1  ", "off", `{match: {name: "*"}, set: {overlay: on}}`)
	})
}

// fast asks until packets of both directions take the fast path, at both nodes.
func (s *swarm) fast(d *dialogue) {
	s.t.Helper()
	fast(s.t, d, s.web[:]...)
}

// killed kills agents during dialogues. No dialogue may break, and under the next agent packets
// become fast again. A stopped agent, and a restore, must leave nothing behind.
func (s *swarm) killed(talks []*dialogue) {
	s.t.Helper()
	stop := make(chan struct{})
	var busy sync.WaitGroup
	broken := make([]error, len(talks))
	for i, d := range talks {
		busy.Go(func() {
			for broken[i] == nil {
				select {
				case <-stop:
					return
				default:
					broken[i] = d.ask()
				}
			}
		})
	}
	defer func() {
		close(stop)
		busy.Wait()
		must(s.t, errors.Join(broken...))
	}()
	again := func() {
		s.t.Helper()
		s.start(0)
		s.agents[0].stands("web0", "overlay", api.StateDone)
		await(s.t, "packets to be fast again", func() error {
			end, err := s.agents[0].overlayEnd("web0")
			if err == nil && (end.Egress.Fast < 20 || end.Ingress.Fast < 20) {
				err = fmt.Errorf("they are %+v", end)
			}
			return err
		})
	}
	a := s.agents[0]
	for _, mend := range []func(){
		again, // takes over what the killed one has left
		func() {
			mustSay(s.t, a.run("restore", "--state-dir", a.path("state")), 0)
			s.nothing(0)
			again()
		},
	} {
		a.kill()
		for name, now := range devicesOf(s.t, s.engines[0].NS) {
			if strings.Contains(name, " flwire ") && now != s.host[0][name] {
				s.t.Errorf("the agent was killed, and %s is %s, was %s", name, now, s.host[0][name])
			}
		}
		mend()
	}
	a.stop()
	s.nothing(0)
	again()
}

// nothing waits until a node has no device of the fast path.
func (s *swarm) nothing(n int) {
	s.t.Helper()
	none := func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			if strings.HasPrefix(l.Attrs().Name, "flov") {
				return fmt.Errorf("%s is left", l.Attrs().Name)
			}
		}
		return err
	}
	under := s.path(n)
	await(s.t, "nothing to be left", func() error { return errors.Join(s.engines[n].NS.Do(none), in(under, none)) })
}

// encrypted tests a network with IPsec encryption.
func (s *swarm) encrypted() {
	s.t.Helper()
	const network = "flsecret"
	s.engines[0].Must(s.t, "network", "create", "-d", "overlay", "--attachable", "--opt", "encrypted", "--subnet", "10.218.0.0/24", network)
	var both []*overlaid
	for n, d := range s.engines {
		both = append(both, joined(s.t, s.agents[n], d, network, "secret"))
	}
	for _, c := range both {
		c.stands(c.name, "overlay", api.StatePartly, "IPsec", "encrypted")
	}
	mustSay(s.t, s.agents[0].run("overlay"), 0, "left alone", "an encrypted network stays as it is")
	for _, c := range both {
		c.engine.Must(s.t, "rm", "-f", c.name)
	}
	s.engines[0].Must(s.t, "network", "rm", network)
}

// published requests a service's port from outside: at the other node, through the Swarm's ingress
// network, and at its task's node, past it. The first needs IPVS, which the reference kernel lacks,
// so rules lead the packets the same way.
func (s *swarm) published() {
	s.t.Helper()
	asked, d := s.engines[0], s.engines[1]
	asked.Must(s.t, "service", "create", "--detach", "--no-resolve-image", "--name", "webport", "--stop-signal", "KILL",
		"--constraint", "node.id=="+d.Must(s.t, "info", "--format", "{{.Swarm.NodeID}}"), "--publish", "9000:9000", "--publish", "9000:9000/udp",
		"--publish", "mode=host,target=9000,published=9001", d.Image, "sleep", "1000")
	task := &overlaid{agent: s.agents[1], engine: d}
	await(s.t, "the task", func() (err error) {
		if task.name = d.Must(s.t, "ps", "--filter", "name=webport", "--format", "{{.Names}}"); task.name == "" {
			err = errors.New("none runs")
		}
		return err
	})
	task.addr = d.Must(s.t, "inspect", "--format", "{{.NetworkSettings.Networks.ingress.IPAddress}}", task.name)
	task.stands(task.name, "overlay", api.StateDone)
	task.echo()

	balancer, _, _ := strings.Cut(asked.Must(s.t, "network", "inspect", "--format", `{{(index .Containers "ingress-sbox").IPv4Address}}`, "docker_gwbridge"), "/")
	const port = "chain in { type nat hook prerouting priority -100; meta l4proto { tcp, udp } th dport 9000 dnat to %s; };"
	must(s.t, asked.NS.Do(ran("nft", fmt.Sprintf("table ip fl_port { "+port+" }", balancer))))
	must(s.t, asked.NS.Do(ran("iptables", "-I", "DOCKER-USER", "-d", balancer, "-j", "ACCEPT")))
	sandbox := fmt.Sprintf("/proc/%d/root/%s/exec/netns/ingress_sbox", asked.PID(), filepath.Dir(asked.Socket))
	must(s.t, in(sandbox, ran("sysctl", "-q", "net.ipv4.ip_forward=1")))
	must(s.t, in(sandbox, ran("nft", fmt.Sprintf("table ip fl_port { "+port+" chain out { type nat hook postrouting priority 100; ip daddr %[1]s masquerade; }; }", task.addr))))

	fast(s.t, dial(s.t, d.NS.Do, "tcp", "10.214.0.1:9000"), task)
	fast(s.t, dial(s.t, s.web[1].do, "tcp", "10.214.0.1:9000"), task)
	talk := dial(s.t, d.NS.Do, "udp", "10.214.0.1:9000")
	fast(s.t, talk, task)
	before, err := task.overlayEnd(task.name)
	must(s.t, err)
	for _, from := range []func(func() error) error{asked.NS.Do, s.web[0].do} {
		d := dial(s.t, from, "tcp", "10.214.0.2:9001")
		for range 40 {
			must(s.t, d.ask())
		}
	}
	if now, err := task.overlayEnd(task.name); err != nil || now.Egress.Fast >= before.Egress.Fast+20 || now.Ingress.Fast >= before.Ingress.Fast+20 {
		s.t.Errorf("packets that do not pass the network were counted: %+v, before %+v; %v", now, before, err)
	}

	o, err := task.api.Overlay(s.t.Context(), task.name, 0)
	must(s.t, err)
	ingress := s.find(o.Networks[0].NetNS)
	must(s.t, in(ingress, ran("nft", "table bridge fl_deny { chain f { type filter hook forward priority 0; ip daddr "+task.addr+" drop; }; }")))
	talk.denied()
	must(s.t, in(ingress, ran("nft", "delete table bridge fl_deny")))
	fast(s.t, talk, task)
	asked.Must(s.t, "service", "rm", "webport")
	await(s.t, "the task's end", func() (err error) {
		if _, gone := d.Run("inspect", task.name); gone == nil {
			err = errors.New("it is there")
		}
		return err
	})
	talk.denied()
}

// ran runs a command.
func ran(name string, args ...string) func() error {
	return func() error {
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s %q: %w: %s", name, args, err, out)
		}
		return nil
	}
}

// removed makes Docker remove the network. Its namespace must end, as no agent holds it.
func (s *swarm) removed() {
	s.t.Helper()
	for _, c := range s.web {
		c.engine.Must(s.t, "rm", "-f", c.name)
	}
	for n := range s.engines {
		await(s.t, "all to be as before", func() error {
			host, under := s.devices(n)
			return errors.Join(host.diff(s.host[n]), under.diff(s.under[n]))
		})
		// A veth disappears with the namespace of its other end.
		probe := testkit.NetNS(s.t)
		h := probe.Handle(s.t)
		must(s.t, in(s.path(n), func() error {
			return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "flprobe"}, PeerName: "flprobe", PeerNamespace: netlink.NsFd(probe.FD())})
		}))
		s.engines[n].Must(s.t, "rm", "-f", s.plain[n].name)
		await(s.t, "the network's namespace to end", func() error {
			if _, err := h.LinkByName("flprobe"); err == nil {
				return errors.New("its device is there")
			}
			return nil
		})
	}
	s.engines[0].Must(s.t, "network", "rm", testkit.SwarmNetwork)
	for _, a := range s.agents {
		await(s.t, "no network to be known", func() error { return says(a.run("overlay"), 0, "This host is on no overlay network.") })
		a.stop()
	}
}
