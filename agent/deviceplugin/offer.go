package deviceplugin

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	kubelet "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// offer is one resource with the server that kubelet calls about it.
type offer struct {
	kubelet.UnimplementedDevicePluginServer

	resource string
	path     string
	nudge    func() // requests a round

	// Of the goroutine of Run:
	server *grpc.Server // nil: none
	bound  socket
	tried  time.Time // the last registration

	mu      sync.Mutex
	amount  int
	changed chan struct{} // closed when amount changes, or the server ends
	at      socket        // kubelet's socket, by which it was told; zero: it was not
	turn    int           // number of the registration
	streams int           // open ones of this turn
	hung    bool          // kubelet has hung up in this turn
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
		o.wake()
	}
}

// wake continues the streams. The caller holds o.mu.
func (o *offer) wake() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// begin starts a new turn: streams from before no longer count.
func (o *offer) begin() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.turn++
	o.streams, o.hung, o.tried = 0, false, time.Now()
}

// done notes that kubelet was told at a socket (zero: it was not), or why it was not, and returns
// the reason of before.
func (o *offer) done(at socket, err error) (was error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil || o.hung { // even before Register returned
		at = socket{}
	}
	was, o.err, o.at = o.err, err, at
	return was
}

// known reports whether kubelet was told at a socket, and has not hung up since.
func (o *offer) known(at socket) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.at == at
}

// serves reports whether the server's socket is where kubelet looks for it.
func (o *offer) serves() bool {
	now, err := identify(o.path)
	return err == nil && o.server != nil && now == o.bound
}

// listen makes the socket, in place of any other there, and serves.
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

// close ends the server, and removes its socket.
func (o *offer) close() {
	if o.server == nil {
		return
	}
	o.mu.Lock()
	o.turn++
	o.streams, o.at = 0, socket{}
	o.wake()
	o.mu.Unlock()
	o.server.Stop()
	o.server = nil
}

// GetDevicePluginOptions implements kubelet.DevicePluginServer: all calls are optional that could
// keep a container from starting while there is no agent.
func (o *offer) GetDevicePluginOptions(context.Context, *kubelet.Empty) (*kubelet.DevicePluginOptions, error) {
	return &kubelet.DevicePluginOptions{}, nil
}

// ListAndWatch implements kubelet.DevicePluginServer: it sends all devices, and again whenever
// there are more or fewer.
func (o *offer) ListAndWatch(_ *kubelet.Empty, stream kubelet.DevicePlugin_ListAndWatchServer) error {
	o.mu.Lock()
	turn := o.turn
	o.streams++
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if turn != o.turn {
			return
		}
		if o.streams--; o.streams == 0 { // kubelet has hung up, and has to be told again
			o.at, o.hung = socket{}, true
			o.nudge()
		}
	}()
	for sent := -1; ; {
		o.mu.Lock()
		amount, changed, over := o.amount, o.changed, turn != o.turn
		o.mu.Unlock()
		if over {
			return nil
		}
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

// devices lists so many devices. Their names are short, because kubelet sends, stores and compares
// lists of them: the first ones stay when there are fewer.
func devices(n int) []*kubelet.Device {
	list := make([]*kubelet.Device, n)
	for i := range list {
		list[i] = &kubelet.Device{ID: strconv.Itoa(i), Health: kubelet.Healthy}
	}
	return list
}

// Allocate implements kubelet.DevicePluginServer: a container is given no file, mount or variable.
func (o *offer) Allocate(_ context.Context, req *kubelet.AllocateRequest) (*kubelet.AllocateResponse, error) {
	resp := &kubelet.AllocateResponse{}
	for range req.GetContainerRequests() {
		resp.ContainerResponses = append(resp.ContainerResponses, &kubelet.ContainerAllocateResponse{})
	}
	return resp, nil
}
