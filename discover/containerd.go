package discover

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	containers "github.com/containerd/containerd/api/services/containers/v1"
	content "github.com/containerd/containerd/api/services/content/v1"
	events "github.com/containerd/containerd/api/services/events/v1"
	images "github.com/containerd/containerd/api/services/images/v1"
	namespaces "github.com/containerd/containerd/api/services/namespaces/v1"
	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	namespaceHeader = "containerd-namespace"
	maxMessage      = 16 << 20 // containerd's own limit

	// dockerNamespace holds the containers of a Docker Engine, which reports more about them than
	// containerd does.
	dockerNamespace = "moby"
)

// Labels and extensions that kubelet and the CRI plugin write.
const (
	kubeletPrefix  = "io.kubernetes."
	podLabel       = "io.kubernetes.pod.name"
	namespaceLabel = "io.kubernetes.pod.namespace"
	uidLabel       = "io.kubernetes.pod.uid"
	containerLabel = "io.kubernetes.container.name"
	kindLabel      = "io.cri-containerd.kind"
	nerdctlName    = "nerdctl/name"

	containerMetadata = "io.cri-containerd.container.metadata"
	sandboxMetadata   = "io.cri-containerd.sandbox.metadata"
)

// Containerd is the source for the containers of containerd in all its namespaces except Docker's.
// addr is the path of its socket; if empty, all of ContainerdAddrs are tried. Only the CRI's
// metadata makes a container part of a pod; labels do not. A pod's labels and annotations apply to
// each of its containers, and annotations override labels. Only the labels apply to the pause
// container, which holds the pod's namespaces and which a Set does not list.
func Containerd(addr string) Source {
	if addr != "" {
		return containerdAt(strings.TrimPrefix(addr, "unix://"))
	}
	var all places
	for _, addr := range ContainerdAddrs() {
		all = append(all, containerdAt(addr))
	}
	return all
}

func containerdAt(addr string) Source {
	return rostered{"containerd", addr, containerd{addr}.session}
}

type containerd struct{ addr string }

// cri is one connection to containerd. A container's key is namespace/id.
type cri struct {
	containers containers.ContainersClient
	tasks      tasks.TasksClient
	images     images.ImagesClient
	content    content.ContentClient
}

func (c containerd) session(ctx context.Context, r *roster) error {
	conn, err := dial(ctx, c.addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	now := cri{containers.NewContainersClient(conn), tasks.NewTasksClient(conn), images.NewImagesClient(conn), content.NewContentClient(conn)}
	spaces := namespaces.NewNamespacesClient(conn)

	stream, err := events.NewEventsClient(conn).Subscribe(ctx, &events.SubscribeRequest{Filters: []string{
		`topic=="/tasks/create"`, `topic=="/tasks/start"`, `topic=="/tasks/exit"`, `topic=="/tasks/delete"`, `topic=="/containers/update"`,
	}})
	if err != nil {
		return err
	}
	messages, broken := make(chan *types.Envelope), make(chan error, 1)
	go func() { broken <- forward(ctx, stream.Recv, messages) }()
	// containerd may start to watch only after the request for the stream. A second list soon after
	// the first covers the gap.
	return watched(ctx, r, messages, broken, time.Second, relistEvery, func(msg *types.Envelope) bool {
		if msg.GetNamespace() != dockerNamespace {
			now.event(ctx, r, msg)
		}
		return false
	}, func(ctx context.Context) ([]string, current, error) {
		running, err := now.list(ctx, spaces)
		return slices.Collect(maps.Keys(running)), func(key string, rec Record) bool { return running[key] == rec.PID }, err
	}, now.inspect)
}

// dial connects to a runtime that speaks gRPC at a socket.
func dial(ctx context.Context, addr string, more ...grpc.DialOption) (*grpc.ClientConn, error) {
	if err := listens(ctx, addr); err != nil {
		return nil, err
	}
	return grpc.NewClient("unix://"+addr, append(more,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))...)
}

func (c cri) event(ctx context.Context, r *roster, msg *types.Envelope) {
	ev, err := typeurl.UnmarshalAny(msg.GetEvent())
	if err != nil {
		return // an unknown one; the next list makes up for it
	}
	key := func(id string) string { return msg.GetNamespace() + "/" + id }
	switch ev := ev.(type) {
	case *eventtypes.TaskCreate: // its first process is there, and waits for the start
		r.ask(ctx, key(ev.GetContainerID()), c.inspect)
	case *eventtypes.TaskStart:
		if !r.knows(key(ev.GetContainerID())) {
			r.ask(ctx, key(ev.GetContainerID()), c.inspect)
		}
	case *eventtypes.ContainerUpdate:
		// A pending answer may predate the update.
		if r.knows(key(ev.GetID())) {
			r.ask(ctx, key(ev.GetID()), c.inspect)
		}
	case *eventtypes.TaskExit:
		if ev.GetID() == ev.GetContainerID() { // else it is an added process
			r.end(key(ev.GetContainerID()), false)
		}
	case *eventtypes.TaskDelete:
		if ev.GetID() == "" || ev.GetID() == ev.GetContainerID() {
			r.end(key(ev.GetContainerID()), false)
		}
	}
}

// list returns the PIDs of the first processes of running containers, by key.
func (c cri) list(ctx context.Context, spaces namespaces.NamespacesClient) (map[string]int, error) {
	all, err := spaces.List(ctx, &namespaces.ListNamespacesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list namespaces: %w", unanswered(ctx, err))
	}
	running := make(map[string]int)
	for _, space := range all.GetNamespaces() {
		if space.GetName() == dockerNamespace {
			continue
		}
		in := metadata.AppendToOutgoingContext(ctx, namespaceHeader, space.GetName())
		list, err := c.tasks.List(in, &tasks.ListTasksRequest{})
		if err != nil {
			return nil, fmt.Errorf("list tasks of namespace %s: %w", space.GetName(), unanswered(ctx, err))
		}
		for _, t := range list.GetTasks() {
			if alive(t) && len(running) < maxRecords {
				// In lists, the id is the container's.
				running[space.GetName()+"/"+cmp.Or(t.GetContainerID(), t.GetID())] = int(t.GetPid())
			}
		}
	}
	return running, nil
}

func alive(t *task.Process) bool {
	switch t.GetStatus() {
	case task.Status_CREATED, task.Status_RUNNING, task.Status_PAUSED, task.Status_PAUSING:
		return t.GetPid() > 0
	}
	return false
}

func (c cri) inspect(ctx context.Context, key string) (Record, bool, error) {
	space, id, _ := strings.Cut(key, "/")
	ctx = metadata.AppendToOutgoingContext(ctx, namespaceHeader, space)
	t, err := c.tasks.Get(ctx, &tasks.GetRequest{ContainerID: id})
	if err != nil || !alive(t.GetProcess()) {
		return Record{}, false, unlessGone(err)
	}
	got, err := c.containers.Get(ctx, &containers.GetContainerRequest{ID: id})
	if err != nil {
		return Record{}, false, unlessGone(err)
	}
	ct := got.GetContainer()
	var pod *containers.Container
	var lack error
	if sandbox := criMetadata(ct, containerMetadata).SandboxID; sandbox != "" {
		got, err := c.containers.Get(ctx, &containers.GetContainerRequest{ID: sandbox})
		if pod, err = got.GetContainer(), unlessGone(err); err != nil {
			lack = fmt.Errorf("read its pod: %w", err)
		}
	}
	rec := criRecord(ct, pod)
	rec.PID, rec.Unread = int(t.GetProcess().GetPid()), lack != nil
	if !ofCRI(ct) && len(rec.Labels) > 0 && ct.GetImage() != "" {
		platforms, err := c.imageLabels(ctx, ct.GetImage())
		if err != nil {
			platforms = []map[string]string{rec.Labels} // any of them may be the image's
		}
		rec.ofImage(platforms)
		rec.Name = cmp.Or(rec.Labels[nerdctlName], ct.GetID())
		if err != nil && !errors.Is(err, errImage) {
			rec.Unread = true
			return rec, true, fmt.Errorf("read the labels of image %q: %w", ct.GetImage(), err)
		}
	}
	return rec, true, lack
}

// unlessGone returns the error of a query about a container, or nil if the runtime does not know
// the container.
func unlessGone(err error) error {
	if status.Code(err) == codes.NotFound {
		return nil
	}
	return err
}

// ofCRI reports whether the CRI plugin made a container. Only a client of containerd can write
// extensions, whereas labels may come from an image.
func ofCRI(ct *containers.Container) bool {
	ext := ct.GetExtensions()
	return ext[containerMetadata] != nil || ext[sandboxMetadata] != nil
}

// criRecord joins containerd's data on a container and on its pod's sandbox, which is nil without a
// pod. In containerd, the labels of a CRI container are those of both the image and the request.
// Only the metadata tells the labels of the request.
func criRecord(ct, pod *containers.Container) Record {
	rec := Record{RuntimeID: ct.GetID(), Image: ct.GetImage(), Name: ct.GetID()}
	if !ofCRI(ct) {
		rec.Labels = maps.Clone(ct.GetLabels())
		return rec
	}
	own, sandbox := criMetadata(ct, containerMetadata).Config, criMetadata(pod, sandboxMetadata).Config
	if ct.GetExtensions()[sandboxMetadata] != nil {
		sandbox = criMetadata(ct, sandboxMetadata).Config
		own.Labels = sandbox.Labels
		rec.Name, rec.Sandbox, rec.Labels = "pause", true, maps.Clone(sandbox.Labels)
	} else {
		rec.Name = cmp.Or(own.Metadata.Name, ct.GetID())
		rec.Labels = merged(sandbox.Labels, own.Labels)
		rec.annotate(merged(sandbox.Annotations, own.Annotations))
	}
	rec.ImageLabels, _ = part(ct.GetLabels(), own.Labels)
	delete(rec.ImageLabels, kindLabel) // the CRI plugin sets it
	rec.Pod, rec.Namespace, rec.PodUID = sandbox.Metadata.Name, sandbox.Metadata.Namespace, sandbox.Metadata.UID
	rec.PodCgroup = podCgroup(sandbox.Linux.CgroupParent, rec.PodUID)
	return rec
}

// annotate adds the users' annotations in the CRI to the labels. Those with kubelet's prefix are
// not the users', and are left out.
func (r *Record) annotate(annotations map[string]string) {
	for key, value := range annotations {
		if strings.HasPrefix(key, kubeletPrefix) {
			continue
		}
		if r.Annotations == nil {
			r.Annotations = make(map[string]bool)
		}
		r.Labels[key], r.Annotations[key] = value, true
	}
}

// criData is what we use of the JSON that the CRI plugin attaches to its containers and sandboxes.
type criData struct {
	SandboxID string
	Config    criConfig
}

// criConfig is kubelet's request: a ContainerConfig or a PodSandboxConfig of the CRI.
type criConfig struct {
	Metadata    struct{ Name, UID, Namespace string }
	Labels      map[string]string
	Annotations map[string]string
	Linux       struct {
		CgroupParent string `json:"cgroup_parent"`
	}
}

// podCgroup returns the name of the cgroup directory that holds exactly the containers of a
// sandbox. With kubelet's cgroupfs driver it is "pod" and the pod's UID. With the systemd driver it
// is a slice whose name ends in that, with the UID's dashes replaced. "" if the sandbox lies
// elsewhere, such as beside all others.
func podCgroup(parent, uid string) string {
	dir := path.Base(parent)
	for _, uid := range []string{uid, strings.ReplaceAll(uid, "-", "_")} {
		if uid != "" && (dir == "pod"+uid || strings.HasSuffix(dir, "-pod"+uid+".slice")) {
			return dir
		}
	}
	return ""
}

// criMetadata parses an extension of a container. It returns zero if that is absent or invalid.
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
