package container

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	containers "github.com/containerd/containerd/api/services/containers/v1"
	events "github.com/containerd/containerd/api/services/events/v1"
	namespaces "github.com/containerd/containerd/api/services/namespaces/v1"
	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
)

const (
	containerdAddr  = "/run/containerd/containerd.sock"
	namespaceHeader = "containerd-namespace"
	maxMessage      = 16 << 20 // containerd's own limit

	// dockerNamespace is where a Docker Engine keeps its containers, which it
	// knows better than containerd does.
	dockerNamespace = "moby"
)

// Labels and extensions that the kubelet and the CRI plugin write.
const (
	podLabel       = "io.kubernetes.pod.name"
	namespaceLabel = "io.kubernetes.pod.namespace"
	nameLabel      = "io.kubernetes.container.name"
	kindLabel      = "io.cri-containerd.kind" // "container" or "sandbox"
	nerdctlName    = "nerdctl/name"

	containerMetadata = "io.cri-containerd.container.metadata"
	sandboxMetadata   = "io.cri-containerd.sandbox.metadata"
)

// Containerd is the source for the containers of containerd, in all namespaces
// except Docker's. addr is the path of its socket; empty means the usual one. A
// pod's labels and annotations apply to each of its containers, except the pause
// container that holds the pod's namespaces, which is called "pause" and has only
// its own labels.
func Containerd(addr string) Source {
	return &containerd{addr: strings.TrimPrefix(cmp.Or(addr, containerdAddr), "unix://")}
}

type containerd struct{ addr string }

func (c *containerd) Name() string { return "containerd" }

func (c *containerd) Run(ctx context.Context, publish func(Report)) error {
	r := newRoster(publish)
	r.follow(ctx, func(ctx context.Context) error { return wrap(c.Name(), c.addr, c.session(ctx, r)) })
	return nil
}

// cri is one connection to containerd. A container's key is namespace/id.
type cri struct {
	containers containers.ContainersClient
	tasks      tasks.TasksClient
}

func (c *containerd) session(ctx context.Context, r *roster) error {
	if err := listens(ctx, c.addr); err != nil {
		return err
	}
	conn, err := grpc.NewClient("unix://"+c.addr,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return err
	}
	defer conn.Close()
	now := cri{containers.NewContainersClient(conn), tasks.NewTasksClient(conn)}
	spaces := namespaces.NewNamespacesClient(conn)

	stream, err := events.NewEventsClient(conn).Subscribe(ctx, &events.SubscribeRequest{Filters: []string{
		`topic=="/tasks/start"`, `topic=="/tasks/exit"`, `topic=="/tasks/delete"`, `topic=="/containers/update"`,
	}})
	if err != nil {
		return err
	}
	messages, broken := make(chan *types.Envelope), make(chan error, 1)
	go func() {
		for {
			msg, err := stream.Recv()
			if err != nil {
				broken <- err
				return
			}
			select {
			case messages <- msg:
			case <-ctx.Done():
				return
			}
		}
	}()
	// The request for the stream does not mean that containerd has begun to
	// watch. A second list soon after closes the gap.
	relist := time.NewTimer(0)
	defer relist.Stop()
	pause := time.Second
	for {
		select {
		case msg := <-messages:
			if msg.GetNamespace() != dockerNamespace {
				now.event(ctx, r, msg)
			}
		case got := <-r.answers:
			r.take(got)
		case <-relist.C:
			running, err := now.list(ctx, spaces)
			if err != nil {
				return err
			}
			current := func(key string, rec Record) bool { return running[key] == rec.PID }
			r.replace(ctx, keysOf(running), current, now.inspect)
			relist.Reset(pause)
			pause = relistEvery
		case err := <-broken:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func keysOf(m map[string]int) []string {
	var keys []string
	for key := range maps.Keys(m) {
		keys = append(keys, key)
	}
	return keys
}

func (c cri) event(ctx context.Context, r *roster, msg *types.Envelope) {
	ev, err := typeurl.UnmarshalAny(msg.GetEvent())
	if err != nil {
		return // none that we know; the next list makes up for it
	}
	key := func(id string) string { return msg.GetNamespace() + "/" + id }
	switch ev := ev.(type) {
	case *eventtypes.TaskStart:
		r.ask(ctx, key(ev.GetContainerID()), c.inspect)
	case *eventtypes.ContainerUpdate:
		if _, runs := r.records[key(ev.GetID())]; runs {
			r.ask(ctx, key(ev.GetID()), c.inspect)
		}
	case *eventtypes.TaskExit:
		if ev.GetID() == ev.GetContainerID() { // else it is a process that was put in
			r.end(key(ev.GetContainerID()))
		}
	case *eventtypes.TaskDelete:
		if ev.GetID() == "" || ev.GetID() == ev.GetContainerID() {
			r.end(key(ev.GetContainerID()))
		}
	}
}

// list returns the containers that run, and the PIDs of their first processes.
func (c cri) list(ctx context.Context, spaces namespaces.NamespacesClient) (map[string]int, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	all, err := spaces.List(ctx, &namespaces.ListNamespacesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	running := make(map[string]int)
	for _, space := range all.GetNamespaces() {
		if space.GetName() == dockerNamespace {
			continue
		}
		in := metadata.AppendToOutgoingContext(ctx, namespaceHeader, space.GetName())
		list, err := c.tasks.List(in, &tasks.ListTasksRequest{})
		if err != nil {
			return nil, fmt.Errorf("list tasks of namespace %s: %w", space.GetName(), err)
		}
		for _, t := range list.GetTasks() {
			if alive(t) && len(running) < maxRecords {
				// In lists, the id names the container.
				running[space.GetName()+"/"+cmp.Or(t.GetContainerID(), t.GetID())] = int(t.GetPid())
			}
		}
	}
	return running, nil
}

func alive(t *task.Process) bool {
	switch t.GetStatus() {
	case task.Status_RUNNING, task.Status_PAUSED, task.Status_PAUSING:
		return t.GetPid() > 0
	}
	return false
}

func (c cri) inspect(ctx context.Context, key string) (Record, bool, error) {
	space, id, ok := strings.Cut(key, "/")
	if !ok {
		return Record{}, false, errors.New("no namespace in " + key)
	}
	ctx = metadata.AppendToOutgoingContext(ctx, namespaceHeader, space)
	t, err := c.tasks.Get(ctx, &tasks.GetRequest{ContainerID: id})
	if err != nil {
		return Record{}, false, err
	}
	if !alive(t.GetProcess()) {
		return Record{}, false, nil
	}
	got, err := c.containers.Get(ctx, &containers.GetContainerRequest{ID: id})
	if err != nil {
		return Record{}, false, err
	}
	ct := got.GetContainer()
	var pod *containers.Container
	if sandbox := criMetadata(ct, containerMetadata).SandboxID; sandbox != "" {
		// Without the sandbox the container is still known, only without its
		// pod's labels.
		if got, err := c.containers.Get(ctx, &containers.GetContainerRequest{ID: sandbox}); err == nil {
			pod = got.GetContainer()
		}
	}
	rec := criRecord(ct, pod)
	rec.PID = int(t.GetProcess().GetPid())
	return rec, true, nil
}

// criRecord joins what containerd stores for a container and for its pod's
// sandbox, which is nil for a container without a pod.
func criRecord(ct, pod *containers.Container) Record {
	labels := ct.GetLabels()
	rec := Record{
		RuntimeID: ct.GetID(),
		Image:     ct.GetImage(),
		Name:      cmp.Or(labels[nameLabel], labels[nerdctlName], ct.GetID()),
		// Use the labels alone: the kubelet writes them, whereas users write
		// annotations.
		Pod:       labels[podLabel],
		Namespace: labels[namespaceLabel],
		Labels:    make(map[string]string),
	}
	if labels[kindLabel] == "sandbox" {
		rec.Name = "pause"
		maps.Copy(rec.Labels, labels)
		return rec
	}
	if pod != nil {
		maps.Copy(rec.Labels, pod.GetLabels())
		maps.Copy(rec.Labels, criMetadata(pod, sandboxMetadata).Config.Annotations)
	}
	maps.Copy(rec.Labels, criMetadata(ct, containerMetadata).Config.Annotations)
	maps.Copy(rec.Labels, labels)
	return rec
}

// criData is what we use of the JSON that the CRI plugin attaches to its
// containers and sandboxes.
type criData struct {
	SandboxID string
	Config    struct {
		Annotations map[string]string `json:"annotations"`
	}
}

// criMetadata reads an extension of a container; it returns zero if there is none
// that can be read.
func criMetadata(ct *containers.Container, extension string) criData {
	return parseCRI(ct.GetExtensions()[extension].GetValue())
}

func parseCRI(b []byte) criData {
	var versioned struct{ Metadata criData }
	if len(b) == 0 || json.Unmarshal(b, &versioned) != nil {
		return criData{}
	}
	return versioned.Metadata
}
