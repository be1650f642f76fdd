package deviceplugin

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	kubelet "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// fakeKubelet is kubelet's side of the API: it calls ListAndWatch of each plugin that registers.
type fakeKubelet struct {
	kubelet.UnimplementedRegistrationServer

	t      *testing.T
	dir    string
	server *grpc.Server

	mu        sync.Mutex
	refuse    error
	registers map[string]int
	clients   map[string]*grpc.ClientConn
	devices   map[string][]string
	news      chan struct{}
}

func startKubelet(t *testing.T, dir string) *fakeKubelet {
	t.Helper()
	return startRefusing(t, dir, nil)
}

// startRefusing does as kubelet: it removes what is in the directory before it makes its socket.
// Unless refuse is nil, it answers that to each plugin.
func startRefusing(t *testing.T, dir string, refuse error) *fakeKubelet {
	t.Helper()
	old, err := filepath.Glob(filepath.Join(dir, "*"))
	testkit.Must(t, err)
	for _, path := range old {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	k := &fakeKubelet{
		t: t, dir: dir, server: grpc.NewServer(), refuse: refuse, registers: make(map[string]int),
		clients: make(map[string]*grpc.ClientConn), devices: make(map[string][]string), news: make(chan struct{}, 1),
	}
	l, err := net.Listen("unix", filepath.Join(dir, "kubelet.sock"))
	testkit.Must(t, err)
	kubelet.RegisterRegistrationServer(k.server, k)
	go k.server.Serve(l)
	t.Cleanup(k.stop)
	return k
}

func (k *fakeKubelet) stop() {
	k.server.Stop()
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.clients {
		c.Close()
	}
}

func (k *fakeKubelet) Register(_ context.Context, r *kubelet.RegisterRequest) (*kubelet.Empty, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.registers[r.ResourceName]++
	if k.refuse != nil {
		return nil, k.refuse
	}
	if r.Version != kubelet.Version || r.Options.GetPreStartRequired() || filepath.Base(r.Endpoint) != r.Endpoint {
		return nil, fmt.Errorf("unexpected: %v", r)
	}
	conn, err := grpc.NewClient("unix://"+filepath.Join(k.dir, r.Endpoint), grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials())) // at most 4 MB, as kubelet
	if err != nil {
		return nil, err
	}
	k.clients[r.ResourceName] = conn
	go k.watch(r.ResourceName, conn)
	return &kubelet.Empty{}, nil
}

func (k *fakeKubelet) watch(resource string, conn *grpc.ClientConn) {
	stream, err := kubelet.NewDevicePluginClient(conn).ListAndWatch(context.Background(), &kubelet.Empty{})
	for err == nil {
		var list *kubelet.ListAndWatchResponse
		if list, err = stream.Recv(); err != nil {
			break
		}
		ids := []string{}
		for _, d := range list.Devices {
			if d.Health == kubelet.Healthy {
				ids = append(ids, d.ID)
			}
		}
		k.note(resource, conn, ids)
	}
	k.note(resource, conn, nil)
}

// note records the devices of a plugin, unless that has registered anew.
func (k *fakeKubelet) note(resource string, conn *grpc.ClientConn, ids []string) {
	k.mu.Lock()
	if k.clients[resource] == conn {
		k.devices[resource] = ids
	}
	k.mu.Unlock()
	select {
	case k.news <- struct{}{}:
	default:
	}
}

// await waits until kubelet has so many devices of a resource.
func (k *fakeKubelet) await(resource string, n int) {
	k.t.Helper()
	late := time.After(60 * time.Second)
	for {
		k.mu.Lock()
		ids := k.devices[resource]
		k.mu.Unlock()
		if ids != nil && len(ids) == n {
			return
		}
		select {
		case <-k.news:
		case <-late:
			k.t.Fatalf("kubelet has %d devices of %s, want %d", len(ids), resource, n)
		}
	}
}

// amounts is what the node has.
type amounts struct {
	mu sync.Mutex
	of map[string]int
}

func (a *amounts) set(of map[string]int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of = of
}

func (a *amounts) get() map[string]int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.of
}

func start(t *testing.T, dir string, a *amounts) *Plugin {
	t.Helper()
	p := New(Config{Dir: dir, Domain: "fairlead.dev/", Amounts: a.get, Every: 50 * time.Millisecond})
	stop := testkit.Background(t, p.Run)
	t.Cleanup(func() {
		testkit.Check(t, stop())
		if left, _ := filepath.Glob(filepath.Join(dir, prefix+"*")); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	})
	return p
}

// awaitOffer waits for a state of a resource.
func awaitOffer(t *testing.T, p *Plugin, what string, ok func(Offer) bool) {
	t.Helper()
	testkit.Await(t, what, func() bool { return slices.ContainsFunc(p.Offers(), ok) })
}

// TestOffers has a link that becomes slower, a disk that comes, and one that vanishes.
func TestOffers(t *testing.T) {
	dir, a := t.TempDir(), &amounts{of: map[string]int{"egress-mbit": 950, "data-riops": 20000}}
	k := startKubelet(t, dir)
	p := start(t, dir, a)
	k.await("fairlead.dev/egress-mbit", 950)
	k.await("fairlead.dev/data-riops", 20000)
	a.set(map[string]int{"egress-mbit": 95, "log-riops": 3})
	k.await("fairlead.dev/egress-mbit", 95)
	k.await("fairlead.dev/log-riops", 3)
	k.await("fairlead.dev/data-riops", 0)
	awaitOffer(t, p, "not watched", func(o Offer) bool {
		return o.Watched && o.Err == nil && o.Resource == "fairlead.dev/egress-mbit" && o.Amount == 95
	})
	k.mu.Lock()
	defer k.mu.Unlock()
	if ids := k.devices["fairlead.dev/log-riops"]; ids[0] != "0" || ids[2] != "2" {
		t.Errorf("devices are %q", ids)
	}
	if k.registers["fairlead.dev/egress-mbit"] != 1 {
		t.Errorf("registered anew for a change: %v", k.registers)
	}
}

// A container gets nothing to see of what was given to it.
func TestAllocate(t *testing.T) {
	dir, a := t.TempDir(), &amounts{of: map[string]int{"egress-mbit": 10}}
	k := startKubelet(t, dir)
	start(t, dir, a)
	k.await("fairlead.dev/egress-mbit", 10)
	k.mu.Lock()
	client := kubelet.NewDevicePluginClient(k.clients["fairlead.dev/egress-mbit"])
	k.mu.Unlock()
	got, err := client.Allocate(t.Context(), &kubelet.AllocateRequest{ContainerRequests: []*kubelet.ContainerAllocateRequest{
		{DevicesIds: []string{"1", "2"}}, {DevicesIds: []string{"7"}},
	}})
	if err != nil || len(got.ContainerResponses) != 2 || got.ContainerResponses[0].String() != "" {
		t.Errorf("allocate: %v, %v", got, err)
	}
	opts, err := client.GetDevicePluginOptions(t.Context(), &kubelet.Empty{})
	if err != nil || opts.PreStartRequired || opts.GetPreferredAllocationAvailable {
		t.Errorf("options: %v, %v", opts, err)
	}
}

// After a panic the plugin can run again.
func TestPanics(t *testing.T) {
	dir, calls := t.TempDir(), 0
	startKubelet(t, dir)
	p := New(Config{Dir: dir, Domain: "fairlead.dev/", Every: 10 * time.Millisecond, Amounts: func() map[string]int {
		if calls++; calls == 3 {
			panic("at odds")
		}
		return map[string]int{"egress-mbit": calls}
	}})
	func() {
		defer func() {
			if value := recover(); value != "at odds" {
				t.Errorf("it panics with %v", value)
			}
		}()
		p.Run(t.Context())
	}()
	stop := testkit.Background(t, p.Run)
	awaitOffer(t, p, "not watched again", func(o Offer) bool { return o.Watched && o.Amount > 3 })
	testkit.Check(t, stop())
}

// TestKubeletRestarts starts kubelet after the plugin, restarts it, has it hang up and refuse.
func TestKubeletRestarts(t *testing.T) {
	dir, a := filepath.Join(t.TempDir(), "device-plugins"), &amounts{of: map[string]int{"egress-mbit": 950}}
	p := start(t, dir, a) // there is no directory yet
	awaitOffer(t, p, "no kubelet is no error", func(o Offer) bool { return !o.Watched && o.Err == nil })
	testkit.Must(t, os.Mkdir(dir, 0o755))
	first := startKubelet(t, dir)
	first.await("fairlead.dev/egress-mbit", 950)
	first.stop()
	second := startKubelet(t, dir) // removes the plugin's socket
	second.await("fairlead.dev/egress-mbit", 950)

	// kubelet ends the stream, and knows the plugin no more.
	second.mu.Lock()
	second.devices = make(map[string][]string)
	second.clients["fairlead.dev/egress-mbit"].Close()
	second.mu.Unlock()
	second.await("fairlead.dev/egress-mbit", 950)
	second.stop()

	third := startRefusing(t, dir, fmt.Errorf("no more plugins"))
	awaitOffer(t, p, "refusal is not reported", func(o Offer) bool { return o.Err != nil })
	third.mu.Lock()
	third.refuse = nil
	third.mu.Unlock()
	third.await("fairlead.dev/egress-mbit", 950)
}

// A killed agent leaves sockets, in whose place come those of the next one.
func TestLeftSocket(t *testing.T) {
	dir, a := t.TempDir(), &amounts{of: map[string]int{"egress-mbit": 1}}
	k := startKubelet(t, dir)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, prefix+"egress-mbit.sock"), Net: "unix"})
	testkit.Must(t, err)
	l.SetUnlinkOnClose(false)
	l.Close()
	start(t, dir, a)
	k.await("fairlead.dev/egress-mbit", 1)
}

// TestManyDevices has a resource of 100 Gbit/s, in the message size that kubelet takes.
func TestManyDevices(t *testing.T) {
	dir, a := t.TempDir(), &amounts{of: map[string]int{"egress-mbit": 100_000}}
	k := startKubelet(t, dir)
	start(t, dir, a)
	k.await("fairlead.dev/egress-mbit", 100_000)
}
