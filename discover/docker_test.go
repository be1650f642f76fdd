package discover

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// TestDocker runs all that one engine is enough for, since starting it takes longer than any of it.
func TestDocker(t *testing.T) {
	t.Parallel() // beside other runtimes: they wait more than they work
	d := testkit.StartDocker(t)
	s := runSet(t, Config{}, Docker(d.Host), CgroupTree("/proc", ""))
	await(t, s, "the engine", func(snap Snapshot) bool { return snap.Complete })

	t.Run("image names", func(t *testing.T) { testImageNames(t, d, s) })
	t.Run("networks", func(t *testing.T) {
		testNetworks(t, d, s, runSet(t, Config{NetNS: d.NS.Path}, CgroupTree("/proc", "")))
	})
	t.Run("changes", func(t *testing.T) { testChanges(t, d, s) })
}

// start runs a container that sleeps, and removes it when t ends.
func start(t *testing.T, d *testkit.Docker, name string, flags ...string) {
	t.Helper()
	args := append([]string{"run", "-d", "--name", name}, flags...)
	d.Must(t, append(args, d.Image, "sleep", "1000")...)
	t.Cleanup(func() { d.Must(t, "rm", "-f", name) })
}

// bySource waits for a container of a runtime, and for its host ends to be at these bridges: a
// runtime makes devices one after the other, and may have reported the container before.
func bySource(t *testing.T, s *Set, source, name string, masters ...string) container.Container {
	t.Helper()
	snap := await(t, s, fmt.Sprintf("%s's %s at %q", source, name, masters), func(snap Snapshot) bool {
		c, ok := named(snap, name)
		if !ok || c.Source != source || len(masters) > 0 && len(c.Interfaces) != len(masters) {
			return false
		}
		for _, m := range masters {
			if !slices.ContainsFunc(c.Interfaces, func(i container.Interface) bool { return i.Host.Master == m && len(i.Addrs) > 0 }) {
				return false
			}
		}
		return true
	})
	c, _ := named(snap, name)
	return c
}

func testNetworks(t *testing.T, d *testkit.Docker, s, tree *Set) {
	h := d.NS.Handle(t)
	must(t, h.LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "flparent"}}))
	parent, err := h.LinkByName("flparent")
	must(t, err)
	must(t, h.LinkSetUp(parent))
	d.Must(t, "network", "create", "-d", "macvlan", "-o", "parent=flparent", "--subnet", "10.215.0.0/24", "flmac")
	t.Cleanup(func() { d.Must(t, "network", "rm", "flmac") })

	start(t, d, "bridged", "--label", "fairlead.netcpu=isolate", "--label", "odd= a=b\n")
	start(t, d, "joined", "--network", "container:bridged")
	start(t, d, "host", "--network", "host")
	start(t, d, "none", "--network", "none")
	start(t, d, "macvlan", "--network", "flmac")

	bridged := bySource(t, s, "docker", "bridged", "docker0")
	id := d.Must(t, "inspect", "-f", "{{.Id}} {{.State.Pid}}", "bridged")
	testkit.Same(t, "bridged", bridged.RuntimeID+" "+strconv.Itoa(bridged.PID), id)
	if bridged.Image != d.Image || bridged.Labels["fairlead.netcpu"] != "isolate" || bridged.Labels["odd"] != " a=b\n" {
		t.Errorf("image and labels: %+v", bridged)
	}
	for _, dir := range []string{bridged.Cgroup.V2, bridged.Cgroup.CPU} {
		testkit.Same(t, "the cgroup of "+dir, bridged.RuntimeID, filepath.Base(dir))
	}
	if len(bridged.Interfaces) != 1 {
		t.Fatalf("interfaces %+v, want one", bridged.Interfaces)
	}
	eth := bridged.Interfaces[0]
	if eth.Name != "eth0" || eth.Kind != "veth" || eth.Host.NetNS != d.NS.Inode || eth.Host.Master != "docker0" {
		t.Errorf("interface %+v, want its end at docker0 in netns %d", eth, d.NS.Inode)
	}
	checkHostEnd(t, eth)

	if c := bySource(t, s, "docker", "joined", "docker0"); c.NetNS != bridged.NetNS || c.ID == bridged.ID || len(c.Interfaces) != 1 || c.Interfaces[0].Host != eth.Host {
		t.Errorf("joined %+v, want the network of bridged", c)
	}
	// The engine's host namespace is not the one that this process is in.
	testkit.Same(t, "host: netns", d.NS.Inode, bySource(t, s, "docker", "host").NetNS)
	if c := bySource(t, s, "docker", "none"); c.NetNS == 0 || c.NetNS == bridged.NetNS || len(c.Interfaces) != 0 {
		t.Errorf("none: %+v", c)
	}
	await(t, s, "the macvlan", func(snap Snapshot) bool {
		c, ok := named(snap, "macvlan")
		return ok && c.Source == "docker" && len(c.Interfaces) == 1 && c.Interfaces[0].Kind == "macvlan" && c.Interfaces[0].Host == container.HostEnd{}
	})

	// The cgroup tree alone knows the same containers, by other names.
	for _, name := range []string{"bridged", "joined", "none", "macvlan"} {
		want := bySource(t, s, "docker", name)
		await(t, tree, name+" in the cgroup tree", func(snap Snapshot) bool {
			c, ok := named(snap, want.RuntimeID)
			return ok && c.ID == want.ID && c.NetNS == want.NetNS && c.PID == want.PID && len(c.Interfaces) == len(want.Interfaces)
		})
	}
	// To the host around that one, the engine is another host's.
	lone := bySource(t, s, "docker", "none")
	snap := await(t, runSet(t, Config{}, CgroupTree("/proc", "")), "none on the host around", func(snap Snapshot) bool {
		_, ok := named(snap, lone.RuntimeID)
		return ok && snap.Complete
	})
	for _, name := range []string{"bridged", "joined", "macvlan"} {
		if c, ok := named(snap, bySource(t, s, "docker", name).RuntimeID); ok {
			t.Errorf("the host around lists %s: %+v", name, c)
		}
	}
}

// checkHostEnd goes where a host end says that it is.
func checkHostEnd(t *testing.T, i container.Interface) {
	t.Helper()
	ns, err := netdev.Open(i.Host.NSPath)
	if err != nil {
		t.Error(err)
		return
	}
	defer ns.Close()
	l, err := ns.Link(i.Host.Index)
	if err != nil || ns.Inode() != i.Host.NetNS || l.Name != i.Host.Name || l.Peer != i.Index {
		t.Errorf("%s of netns %d: %+v, %v; want the host end %+v", i.Host.NSPath, ns.Inode(), l, err, i)
	}
}

// testImageNames: the engine knows the names of an image that was given by its id.
func testImageNames(t *testing.T, d *testkit.Docker, s *Set) {
	id := strings.TrimPrefix(strings.TrimSpace(d.Must(t, "image", "inspect", "-f", "{{.Id}}", d.Image)), "sha256:")
	names := strings.Fields(d.Must(t, "image", "inspect", "-f", "{{join .RepoTags \" \"}}", d.Image))
	for name, ref := range map[string]string{"named": d.Image, "by-id": id, "by-short-id": id[:12]} {
		d.Must(t, "run", "-d", "--name", name, ref, "sleep", "1000")
		t.Cleanup(func() { d.Must(t, "rm", "-f", name) })
		c := bySource(t, s, "docker", name)
		want := names
		if ref == d.Image {
			want = nil
		}
		if c.Image != ref || !slices.Equal(c.ImageNames, want) || len(names) == 0 {
			t.Errorf("%s: image %q with names %q, want %q with %q", name, c.Image, c.ImageNames, ref, want)
		}
	}
}

func testChanges(t *testing.T, d *testkit.Docker, s *Set) {
	d.Must(t, "network", "create", "flsecond")
	t.Cleanup(func() { d.Must(t, "network", "rm", "flsecond") })
	start(t, d, "changing")
	before := bySource(t, s, "docker", "changing")

	d.Must(t, "network", "connect", "flsecond", "changing")
	snap := await(t, s, "the second network", func(snap Snapshot) bool {
		c, ok := named(snap, "changing")
		return ok && len(c.Interfaces) == 2 && len(c.Interfaces[1].Addrs) > 0
	})
	c, _ := named(snap, "changing")
	checkHostEnd(t, c.Interfaces[1])
	d.Must(t, "network", "disconnect", "flsecond", "changing")
	await(t, s, "the first network alone", func(snap Snapshot) bool {
		c, ok := named(snap, "changing")
		return ok && len(c.Interfaces) == 1
	})

	d.Must(t, "rename", "changing", "changed")
	bySource(t, s, "docker", "changed")
	d.Must(t, "pause", "changed")
	d.Must(t, "unpause", "changed")
	d.Must(t, "rename", "changed", "changing")
	testkit.Same(t, "id", before.ID, bySource(t, s, "docker", "changing").ID)

	d.Must(t, "restart", "-t", "0", "changing")
	await(t, s, "the restart", func(snap Snapshot) bool {
		c, ok := named(snap, "changing")
		return ok && c.PID != before.PID && c.ID != before.ID && c.RuntimeID == before.RuntimeID && len(c.Interfaces) == 1
	})
	if c, ok := s.Lookup(before.ID); !ok || c.Name != "changing" || c.PID != 0 {
		t.Errorf("before the restart it was %+v, %v", c, ok)
	}
	// Its first process goes, behind the engine's back.
	c = bySource(t, s, "docker", "changing")
	must(t, unix.Kill(c.PID, unix.SIGKILL))
	awaitGone(t, s, "changing")
}

// TestEngineErrors has sockets with no proper server.
func TestEngineErrors(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	s := runSet(t, Config{}, Docker("unix://"+file), Podman("no scheme"), Containerd(file))
	snap := await(t, s, "the reports", func(snap Snapshot) bool {
		return !slices.ContainsFunc(snap.Sources[1:2], func(st SourceStatus) bool { return st.Err == nil }) && snap.Sources[0].Listed && snap.Sources[2].Listed
	})
	if snap.Complete {
		t.Error("complete without a word from podman")
	}
	if err := snap.Sources[1].Err; !strings.Contains(err.Error(), "podman at no scheme") || errors.Is(err, io.EOF) {
		t.Errorf("error %v", err)
	}
}
