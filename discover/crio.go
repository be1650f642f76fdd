package discover

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"strings"
	"time"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// CRIOAddr is the usual socket of CRI-O.
const CRIOAddr = "/run/crio/crio.sock"

// relistCRI is the interval at which a runtime without events is listed. kubelet uses the same.
const relistCRI = time.Second

// CRIO is the source for the containers of CRI-O, which it knows by the CRI alone. addr is the path
// of the socket; if empty, CRIOAddr. It treats pods and annotations as Containerd does. The CRI
// does not report the labels of images.
func CRIO(addr string) Source {
	addr = cmp.Or(strings.TrimPrefix(addr, "unix://"), CRIOAddr)
	return rostered{"cri-o", addr, crio{addr}.session}
}

type crio struct{ addr string }

// crioClient is one connection. The key of a sandbox is its id after sandboxPrefix.
type crioClient struct {
	runtimeapi.RuntimeServiceClient
}

const sandboxPrefix = "sandbox/"

func (c crio) session(ctx context.Context, r *roster) error {
	conn, err := dial(ctx, c.addr, grpc.WithAuthority("localhost"))
	if err != nil {
		return err
	}
	defer conn.Close()
	now := crioClient{runtimeapi.NewRuntimeServiceClient(conn)}
	events := make(chan *runtimeapi.ContainerEventResponse)
	go retry(ctx, relistCRI, relistEvery, func(ctx context.Context) { // few versions support events
		if stream, err := now.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{}); err == nil {
			forward(ctx, stream.Recv, events)
		}
	})
	return watched(ctx, r, events, nil, relistCRI, relistCRI, func(ev *runtimeapi.ContainerEventResponse) (list bool) {
		switch key := ev.GetContainerId(); ev.GetContainerEventType() {
		case runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT:
			return true // the event does not tell a container from a sandbox
		case runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT:
			r.end(key, false)
			r.end(sandboxPrefix+key, false)
		}
		return false
	}, func(ctx context.Context) ([]string, current, error) {
		keys, err := now.list(ctx)
		return keys, lives, err
	}, now.inspect)
}

// list returns the keys of running containers and sandboxes.
func (c crioClient) list(ctx context.Context) (keys []string, err error) {
	containers, err := c.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{
		State: &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING},
	}})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", unanswered(ctx, err))
	}
	sandboxes, err := c.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{
		State: &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY},
	}})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", unanswered(ctx, err))
	}
	for _, ct := range containers.GetContainers() {
		keys = append(keys, ct.GetId())
	}
	for _, s := range sandboxes.GetItems() {
		keys = append(keys, sandboxPrefix+s.GetId())
	}
	return keys, nil
}

// crioInfo is the part that we use of the JSON in a verbose answer.
type crioInfo struct {
	SandboxID   string
	PID         int
	RuntimeSpec struct {
		Linux struct{ CgroupsPath string }
	}
}

// infoOf parses a verbose answer; zero if it is invalid.
func infoOf(info map[string]string) (i crioInfo) {
	if json.Unmarshal([]byte(info["info"]), &i) != nil {
		return crioInfo{}
	}
	return i
}

func (c crioClient) inspect(ctx context.Context, key string) (Record, bool, error) {
	if id, ok := strings.CutPrefix(key, sandboxPrefix); ok {
		pod, err := c.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
		if err != nil {
			return Record{}, false, unlessGone(err)
		}
		rec := crioRecord(nil, pod.GetStatus(), infoOf(pod.GetInfo()))
		// Without a pause container, CRI-O's default, the sandbox has no process.
		return rec, rec.PID > 0 && pod.GetStatus().GetState() == runtimeapi.PodSandboxState_SANDBOX_READY, nil
	}
	ct, err := c.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: key, Verbose: true})
	if err != nil {
		return Record{}, false, unlessGone(err)
	}
	info := infoOf(ct.GetInfo())
	if ct.GetStatus().GetState() != runtimeapi.ContainerState_CONTAINER_RUNNING || info.PID <= 0 {
		return Record{}, false, nil
	}
	var pod *runtimeapi.PodSandboxStatus
	var lack error
	if info.SandboxID != "" {
		got, err := c.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: info.SandboxID})
		if pod, err = got.GetStatus(), unlessGone(err); err != nil {
			lack = fmt.Errorf("read its pod: %w", err)
		}
	}
	rec := crioRecord(ct.GetStatus(), pod, info)
	rec.Unread = lack != nil
	return rec, true, lack
}

// crioRecord joins the CRI's data on a container, or on a sandbox if ct is nil, with its pod's.
func crioRecord(ct *runtimeapi.ContainerStatus, pod *runtimeapi.PodSandboxStatus, info crioInfo) Record {
	rec := Record{PID: info.PID}
	if ct == nil {
		rec.RuntimeID, rec.Name, rec.Sandbox, rec.Labels = pod.GetId(), "pause", true, maps.Clone(pod.GetLabels())
	} else {
		image := ct.GetImage()
		rec.RuntimeID, rec.Name = ct.GetId(), cmp.Or(ct.GetMetadata().GetName(), ct.GetId())
		rec.Image = cmp.Or(image.GetUserSpecifiedImage(), image.GetImage(), ct.GetImageRef())
		rec.Labels = merged(pod.GetLabels(), ct.GetLabels())
		rec.annotate(merged(pod.GetAnnotations(), ct.GetAnnotations()))
	}
	of := pod.GetMetadata()
	rec.Pod, rec.Namespace, rec.PodUID = of.GetName(), of.GetNamespace(), of.GetUid()
	parent, _, systemd := strings.Cut(info.RuntimeSpec.Linux.CgroupsPath, ":") // as runc parses it: SLICE:PREFIX:NAME,
	if !systemd {
		parent = path.Dir(parent) // or a directory
	}
	rec.PodCgroup = podCgroup(parent, rec.PodUID)
	return rec
}
