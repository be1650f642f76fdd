// Package deviceplugin offers kubelet what containers on this node can be guaranteed, as extended
// resources by kubelet's device plugin API. The scheduler of Kubernetes then accounts for it.
//
// A device is a unit of a resource, such as 1 Mbit/s, and invisible to containers: Allocate adds
// nothing to them. The features keep the guarantees, and package discover/kubernetes reads which
// container has which. Package agent runs the Plugin.
package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	kubelet "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Config is the configuration of a Plugin.
type Config struct {
	// Dir is kubelet's directory of plugin sockets: /var/lib/kubelet/device-plugins.
	Dir string
	// Domain is the prefix of the resources, including the slash.
	Domain string
	// Amounts returns the current number of devices, by resource without the domain. A resource
	// that it no longer lists has none. It is called from one goroutine.
	Amounts func() map[string]int
	// Every is the interval between checks of Amounts and the sockets without an event; 0: 10 s.
	Every time.Duration
	Log   *slog.Logger // nil: no log
}

// Plugin offers resources to kubelet.
type Plugin struct {
	cfg  Config
	wake chan struct{} // capacity 1

	mu     sync.Mutex
	offers map[string]*offer
}

// Offer is the state of one resource.
type Offer struct {
	Resource string // with its domain
	Amount   int
	Watched  bool  // kubelet has its devices, and receives changes
	Err      error // why kubelet may not know it; also nil while there is no kubelet
}

const (
	registerTime = 5 * time.Second
	retryTime    = time.Second            // after a failure
	eventRest    = 100 * time.Millisecond // least time between checks of the sockets because of events
	prefix       = "fairlead-"            // of the sockets' names
)

// New makes a Plugin that does nothing before Run.
func New(cfg Config) *Plugin {
	cfg.Every = cmp.Or(cfg.Every, 10*time.Second)
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	return &Plugin{cfg: cfg, wake: make(chan struct{}, 1), offers: make(map[string]*offer)}
}

// Run offers the resources until ctx ends, which is not an error. It waits while there is no
// kubelet. When kubelet starts, it removes all sockets of plugins and forgets them, so Run offers
// each resource again.
func (p *Plugin) Run(ctx context.Context) error {
	watch, err := fsnotify.NewWatcher()
	if err != nil {
		p.cfg.Log.Warn("a restart of kubelet is noticed late", "err", err)
		watch = &fsnotify.Watcher{} // its channels are nil: no events
	} else {
		defer watch.Close()
	}
	defer p.close()
	watched := false
	for ctx.Err() == nil {
		// A directory that was recreated needs a new watch.
		if err == nil && !(watched && slices.Contains(watch.WatchList(), p.cfg.Dir)) {
			watched = watch.Add(p.cfg.Dir) == nil
		}
		wait := p.cfg.Every
		if !p.round(ctx) {
			wait = min(wait, retryTime)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		case <-watch.Events:
		case <-watch.Errors:
		case <-p.wake:
		}
		select {
		case <-ctx.Done():
		case <-time.After(eventRest):
		}
	}
	return nil
}

// Offers returns the state of the resources, by name.
func (p *Plugin) Offers() (list []Offer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(p.offers)) {
		list = append(list, p.offers[name].state())
	}
	return list
}

// round brings the sockets and kubelet's knowledge up to date. It reports whether that succeeded.
func (p *Plugin) round(ctx context.Context) bool {
	amounts := p.cfg.Amounts()
	p.mu.Lock()
	for name := range amounts {
		if p.offers[name] == nil {
			path := filepath.Join(p.cfg.Dir, prefix+name+".sock")
			p.offers[name] = &offer{resource: p.cfg.Domain + name, path: path, nudge: p.nudge, changed: make(chan struct{})}
		}
	}
	offers := maps.Clone(p.offers)
	p.mu.Unlock()

	_, err := os.Stat(p.kubelet())
	ok := true
	for name, o := range offers {
		o.set(amounts[name])
		ok = p.offer(ctx, o, err) && ok
	}
	return ok
}

// offer announces one resource, and reports whether kubelet knows it. missing: there is no kubelet.
func (p *Plugin) offer(ctx context.Context, o *offer, missing error) bool {
	if errors.Is(missing, fs.ErrNotExist) {
		o.done(nil) // kubelet does not run; its socket appears when it does
		return true
	}
	err := missing
	if err == nil && !o.serves() {
		err = o.listen()
	}
	if err == nil {
		if o.known() {
			return true
		}
		if time.Since(o.tried) < retryTime {
			return false
		}
		err = p.register(ctx, o)
	}
	was := o.done(err)
	switch {
	case err == nil:
		p.cfg.Log.Info("kubelet was offered a resource", "resource", o.resource, "amount", o.state().Amount)
	case was == nil || was.Error() != err.Error():
		p.cfg.Log.Warn("kubelet does not know a resource: pods that request it are not placed here", "resource", o.resource, "err", err)
	}
	return err == nil
}

func (p *Plugin) kubelet() string {
	return filepath.Join(p.cfg.Dir, filepath.Base(kubelet.KubeletSocket))
}

// register announces a resource to kubelet. kubelet then calls ListAndWatch.
func (p *Plugin) register(ctx context.Context, o *offer) error {
	o.tried = time.Now()
	ctx, cancel := context.WithTimeout(ctx, registerTime)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+p.kubelet(), grpc.WithAuthority("localhost"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("register %s: %w", o.resource, err)
	}
	defer conn.Close()
	_, err = kubelet.NewRegistrationClient(conn).Register(ctx, &kubelet.RegisterRequest{
		Version: kubelet.Version, Endpoint: filepath.Base(o.path), ResourceName: o.resource, Options: &kubelet.DevicePluginOptions{},
	})
	if err != nil {
		return fmt.Errorf("register %s at %s: %w", o.resource, p.kubelet(), err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.told = time.Now()
	return nil
}

// nudge requests a round.
func (p *Plugin) nudge() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// close withdraws everything. kubelet then counts the devices as unhealthy, and gives none of them
// to new pods.
func (p *Plugin) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, o := range p.offers {
		o.close()
	}
}

// socket identifies a socket's file.
type socket struct {
	dev, ino uint64
	made     unix.Timespec // the inode number may be reused
}

func identify(path string) (socket, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return socket{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return socket{st.Dev, st.Ino, st.Ctim}, nil
}

// offer is one resource with the server that kubelet calls about it.
type offer struct {
	kubelet.UnimplementedDevicePluginServer

	resource string
	path     string
	nudge    func() // requests a round

	// Used by the goroutine of Run:
	server *grpc.Server // nil: none
	bound  socket
	tried  time.Time // the last registration

	mu      sync.Mutex
	amount  int
	changed chan struct{} // closed when amount changes
	streams int           // open streams; kubelet opens one after registration, and closes it when it ends
	told    time.Time     // time of the last registration, unless a stream or the server has ended since
	err     error
}

func (o *offer) state() Offer {
	o.mu.Lock()
	defer o.mu.Unlock()
	return Offer{Resource: o.resource, Amount: o.amount, Watched: o.streams > 0, Err: o.err}
}

// set changes the amount.
func (o *offer) set(amount int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if amount != o.amount {
		o.amount = amount
		close(o.changed)
		o.changed = make(chan struct{})
	}
}

// done records why kubelet was not told, or nil, and returns the previous reason.
func (o *offer) done(err error) (was error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	was, o.err = o.err, err
	return was
}

// known reports whether kubelet knows the resource, or was told a moment ago.
func (o *offer) known() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.streams > 0 || time.Since(o.told) < registerTime
}

// serves reports whether the server's socket is where kubelet expects it.
func (o *offer) serves() bool {
	now, err := identify(o.path)
	return err == nil && o.server != nil && now == o.bound
}

// listen makes the socket, replacing any other there, and serves.
func (o *offer) listen() error {
	o.close()
	if err := os.Remove(o.path); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("make socket of a device plugin: %w", err)
	}
	l, err := net.Listen("unix", o.path)
	if err != nil {
		return fmt.Errorf("make socket of a device plugin: %w", err)
	}
	bound, err := identify(o.path)
	if err != nil {
		l.Close()
		return fmt.Errorf("make socket of a device plugin: %w", err)
	}
	o.server, o.bound = grpc.NewServer(), bound
	kubelet.RegisterDevicePluginServer(o.server, o)
	go o.server.Serve(l) // until Stop
	return nil
}

// close stops the server, and removes its socket.
func (o *offer) close() {
	if o.server == nil {
		return
	}
	o.mu.Lock()
	o.told = time.Time{}
	o.mu.Unlock()
	o.server.Stop()
	o.server = nil
}

// GetDevicePluginOptions implements kubelet.DevicePluginServer. It enables no optional call,
// because such a call could keep a container from starting while there is no agent.
func (o *offer) GetDevicePluginOptions(context.Context, *kubelet.Empty) (*kubelet.DevicePluginOptions, error) {
	return &kubelet.DevicePluginOptions{}, nil
}

// ListAndWatch implements kubelet.DevicePluginServer: it sends all devices, again after each change
// of their number.
func (o *offer) ListAndWatch(_ *kubelet.Empty, stream kubelet.DevicePlugin_ListAndWatchServer) error {
	o.mu.Lock()
	o.streams++
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.streams--; o.streams == 0 { // kubelet has disconnected, and must be told again
			o.told = time.Time{}
			o.nudge()
		}
	}()
	for sent := -1; ; {
		o.mu.Lock()
		amount, changed := o.amount, o.changed
		o.mu.Unlock()
		if amount != sent {
			if err := stream.Send(&kubelet.ListAndWatchResponse{Devices: devices(amount)}); err != nil {
				return err
			}
			sent = amount
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

// devices lists n devices. Their names are short, because kubelet sends, stores and compares lists
// of them. A shorter list keeps the first ones.
func devices(n int) []*kubelet.Device {
	list := make([]*kubelet.Device, n)
	for i := range list {
		list[i] = &kubelet.Device{ID: strconv.Itoa(i), Health: kubelet.Healthy}
	}
	return list
}

// Allocate implements kubelet.DevicePluginServer. It gives a container no file, mount or variable.
func (o *offer) Allocate(_ context.Context, req *kubelet.AllocateRequest) (*kubelet.AllocateResponse, error) {
	resp := &kubelet.AllocateResponse{}
	for range req.GetContainerRequests() {
		resp.ContainerResponses = append(resp.ContainerResponses, &kubelet.ContainerAllocateResponse{})
	}
	return resp, nil
}
