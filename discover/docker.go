package discover

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	types "github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/client"
	"golang.org/x/sys/unix"
)

const podmanHost = "unix:///run/podman/podman.sock"

// Docker is the source for the containers of a Docker Engine. host has the form of DOCKER_HOST
// ("unix:///var/run/docker.sock"); if empty, it is DOCKER_HOST, or else Docker's default.
func Docker(host string) Source {
	host = cmp.Or(host, os.Getenv("DOCKER_HOST"), client.DefaultDockerHost)
	return rostered{"docker", host, (&engine{host: host}).session}
}

// Podman is the source for the containers of Podman, by its socket with Docker's API. If host is
// empty, it is the socket of the system service.
func Podman(host string) Source {
	host = cmp.Or(host, podmanHost)
	return rostered{"podman", host, (&engine{host: host}).session}
}

// engine watches a server of the Docker Engine API.
type engine struct {
	host   string
	images labelsOfImages
}

func (e *engine) session(ctx context.Context, r *roster) error {
	if path, ok := strings.CutPrefix(e.host, "unix://"); ok {
		if err := listens(ctx, path); err != nil {
			return err
		}
	}
	now := connection{images: &e.images}
	for to, limit := range map[**client.Client]limit{&now.whole: whole, &now.outline: inOutline} {
		c, closeIdle, err := engineClient(e.host, limit)
		if err != nil {
			return err
		}
		defer closeIdle()
		*to = c
	}
	call, cancel := context.WithTimeout(ctx, callTimeout)
	_, err := now.outline.Ping(call, client.PingOptions{NegotiateAPIVersion: true})
	err = unanswered(call, err)
	cancel()
	if err != nil {
		return err
	}

	// Subscribe before listing, so that no event is lost between the two.
	filter := make(client.Filters).Add("type", "container").
		Add("event", "create", "start", "die", "died", "rename", "update", "destroy", "remove")
	stream := now.outline.Events(ctx, client.EventsListOptions{Filters: filter})
	return watched(ctx, r, stream.Messages, stream.Err, relistEvery, relistEvery, func(msg events.Message) bool {
		switch msg.Action {
		case "create":
			r.ask(ctx, msg.Actor.ID, now.created)
		case "start", "rename", "update":
			r.ask(ctx, msg.Actor.ID, now.inspect)
		default:
			r.end(msg.Actor.ID, msg.Action == "die" || msg.Action == "died")
		}
		return false
	}, func(ctx context.Context) (ids []string, _ current, err error) {
		all, err := now.outline.ContainerList(ctx, client.ContainerListOptions{})
		for _, item := range all.Items {
			ids = append(ids, item.ID)
		}
		return ids, lives, unanswered(ctx, err)
	}, now.inspect)
}

// lives reports whether the process of a record still exists. If it does, the record is valid
// unless an event was lost.
func lives(_ string, rec Record) bool { return unix.Kill(rec.PID, 0) == nil }

// connection is one connection to an engine.
type connection struct {
	whole, outline *client.Client
	images         *labelsOfImages
}

func (c connection) inspect(ctx context.Context, id string) (Record, bool, error) {
	got, err := c.whole.ContainerInspect(ctx, id, client.ContainerInspectOptions{})
	unread := errors.Is(err, errAnswer)
	if unread {
		got, err = c.outline.ContainerInspect(ctx, id, client.ContainerInspectOptions{})
	}
	if errdefs.IsNotFound(err) {
		return Record{}, false, nil
	}
	if err != nil {
		return Record{}, false, err
	}
	ct := got.Container
	if ct.State == nil || !ct.State.Running || ct.State.Pid <= 0 {
		return Record{}, false, nil
	}
	var image string
	var labels map[string]string
	if ct.Config != nil {
		image, labels = ct.Config.Image, ct.Config.Labels
	}
	rec, lack := c.record(ctx, got, image, labels) // the container is known
	rec.PID = ct.State.Pid
	if unread {
		rec.LeftOut = map[string]int{allLabels: maxAnswer}
	}
	return rec, true, lack
}

// created is inspect for a container that has not been started. While an engine starts one, it
// answers a list at once, but an inspection only when the program runs. The start gives the rest.
func (c connection) created(ctx context.Context, id string) (Record, bool, error) {
	filter := make(client.Filters).Add("id", id)
	list, err := c.whole.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: filter})
	if err != nil || len(list.Items) != 1 || len(list.Items[0].Names) == 0 || list.Items[0].Labels[uidLabel] != "" {
		return Record{}, false, nil // only an inspection reports the cgroup of a pod
	}
	item := list.Items[0]
	if !asks(item.Labels) {
		return Record{}, false, nil // everything can wait for the start
	}
	var got client.ContainerInspectResult
	ct := &got.Container
	ct.ID, ct.Name, ct.Image, ct.ImageManifestDescriptor = item.ID, item.Names[0], item.ImageID, item.ImageManifestDescriptor
	if item.NetworkSettings != nil {
		ct.NetworkSettings = &types.NetworkSettings{Networks: item.NetworkSettings.Networks}
	}
	rec, lack := c.record(ctx, got, item.Image, item.Labels)
	return rec, lack == nil, nil
}

// asks reports whether any of the labels may be policy.
func asks(labels map[string]string) bool {
	for key := range labels {
		if strings.HasPrefix(key, "fairlead.") || key == "kubernetes.io/ingress-bandwidth" || key == "kubernetes.io/egress-bandwidth" {
			return true
		}
	}
	return false
}

// record converts an engine's data on a container, without its process. lack is why it is incomplete.
func (c connection) record(ctx context.Context, got client.ContainerInspectResult, name string, labels map[string]string) (rec Record, lack error) {
	ct := got.Container
	rec = Record{Name: strings.TrimPrefix(ct.Name, "/"), RuntimeID: ct.ID, Image: name}
	if len(labels) > 0 {
		rec.Labels = labels
	}
	if ct.NetworkSettings != nil {
		rec.Networks = len(ct.NetworkSettings.Networks)
	}
	if ct.Image != "" && rec.Labels != nil { // Podman's --rootfs has none
		image, err := c.images.of(ctx, c.whole, got)
		if err != nil { // any of the labels may be the image's
			image = labelsOfImage{rec.Labels}
			if !errdefs.IsNotFound(err) && !errors.Is(err, errAnswer) && !errors.Is(err, errImage) {
				lack = fmt.Errorf("read the labels of image %s: %w", ct.Image, err)
			}
		}
		rec.ofImage(image)
	}
	// Users can write these labels, too, but only cri-dockerd puts a container below this directory.
	if ct.HostConfig != nil {
		if rec.PodCgroup = podCgroup(ct.HostConfig.CgroupParent, rec.Labels[uidLabel]); rec.PodCgroup != "" {
			rec.Pod, rec.Namespace, rec.PodUID = rec.Labels[podLabel], rec.Labels[namespaceLabel], rec.Labels[uidLabel]
		}
	}
	if ct.Image != "" && unnamed(rec.Image, ct.Image) {
		var err error
		if rec.ImageNames, err = c.names(ctx, ct.Image); err != nil {
			lack = cmp.Or(lack, fmt.Errorf("read the names of image %s: %w", ct.Image, err))
		}
	}
	rec.Unread = lack != nil
	return rec, lack
}

// names returns the current names of an image. They are not cached, as its labels are, because a
// name can move from one image to another.
func (c connection) names(ctx context.Context, image string) ([]string, error) {
	got, err := c.outline.ImageInspect(ctx, image)
	if errdefs.IsNotFound(err) { // it was removed
		return nil, nil
	}
	cut := func(name string) bool { return len(name) >= maxName } // it may be cut
	return slices.DeleteFunc(append(got.RepoTags, got.RepoDigests...), cut), err
}

// unnamed reports whether a reference is an image's id or digest. Only the engine can map these to
// names.
func unnamed(ref, id string) bool {
	id = strings.TrimPrefix(id, "sha256:")
	short := strings.TrimPrefix(ref, "sha256:")
	return strings.Contains(ref, "@") || len(short) >= minID && strings.HasPrefix(id, short)
}

// minID is the least number of digits of an id. It is above 4, as an image may be called cafe.
// Docker prints twelve digits.
const minID = 6

// allLabels stands for all labels, if they are too many to read.
const allLabels = "fairlead.*"

// ofImage separates the labels of the record's image, on any of its platforms, from its own.
func (r *Record) ofImage(platforms []map[string]string) {
	for _, labels := range platforms {
		var alike map[string]string
		r.Labels, alike = part(r.Labels, labels)
		r.ImageLabels = merged(r.ImageLabels, alike)
	}
}

// part splits labels into those that other lacks or has with another value, and the rest. A runtime
// merges the labels of an image into its container's. There only the value shows where a label
// comes from.
func part(labels, other map[string]string) (apart, alike map[string]string) {
	for key, value := range labels {
		to := &apart
		if v, ok := other[key]; ok && v == value {
			to = &alike
		}
		if *to == nil {
			*to = make(map[string]string)
		}
		(*to)[key] = value
	}
	return apart, alike
}
