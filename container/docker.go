package container

import (
	"cmp"
	"context"
	"os"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/client"
	"golang.org/x/sys/unix"
)

const podmanHost = "unix:///run/podman/podman.sock"

// Docker is the source for the containers of a Docker Engine. host is in the
// form of DOCKER_HOST ("unix:///var/run/docker.sock"); if empty, DOCKER_HOST
// itself counts, and then Docker's default.
func Docker(host string) Source {
	return &engine{name: "docker", host: cmp.Or(host, os.Getenv("DOCKER_HOST"), client.DefaultDockerHost)}
}

// Podman is the source for the containers of Podman, by way of the socket that
// speaks Docker's API. If host is empty it is that of the system service.
func Podman(host string) Source {
	return &engine{name: "podman", host: cmp.Or(host, podmanHost)}
}

// engine watches whoever speaks the Docker Engine API.
type engine struct {
	name string
	host string
}

func (e *engine) Name() string { return e.name }

func (e *engine) Run(ctx context.Context, publish func(Report)) error {
	r := newRoster(e.name, e.host, publish)
	r.follow(ctx, func(ctx context.Context) error { return e.session(ctx, r) })
	return nil
}

func (e *engine) session(ctx context.Context, r *roster) error {
	if path, ok := strings.CutPrefix(e.host, "unix://"); ok {
		if err := listens(ctx, path); err != nil {
			return err
		}
	}
	c, err := client.New(client.WithHost(e.host), client.WithUserAgent("fairlead"))
	if err != nil {
		return err
	}
	defer c.Close()
	call, cancel := context.WithTimeout(ctx, callTimeout)
	_, err = c.Ping(call, client.PingOptions{NegotiateAPIVersion: true})
	cancel()
	if err != nil {
		return err
	}
	look := func(ctx context.Context, id string) (Record, bool, error) { return inspectEngine(ctx, c, id) }

	// Subscribe before listing, so that no event is lost between the two.
	filter := make(client.Filters).Add("type", "container").
		Add("event", "start", "die", "died", "rename", "update", "destroy", "remove")
	stream := c.Events(ctx, client.EventsListOptions{Filters: filter})
	relist := time.NewTimer(0)
	defer relist.Stop()
	for {
		select {
		case msg := <-stream.Messages:
			switch msg.Action {
			case "start", "rename", "update":
				r.ask(ctx, msg.Actor.ID, look)
			default:
				r.end(msg.Actor.ID)
			}
		case got := <-r.answers:
			r.take(got)
		case <-relist.C:
			call, cancel := context.WithTimeout(ctx, callTimeout)
			all, err := c.ContainerList(call, client.ContainerListOptions{})
			cancel()
			if err != nil {
				return err
			}
			var ids []string
			for _, item := range all.Items {
				ids = append(ids, item.ID)
			}
			r.replace(ctx, ids, lives, look)
			relist.Reset(relistEvery)
		case err := <-stream.Err:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// lives says whether the process of a record still exists. If so, only a lost
// event can have made the record wrong.
func lives(_ string, rec Record) bool { return unix.Kill(rec.PID, 0) == nil }

func inspectEngine(ctx context.Context, c *client.Client, id string) (Record, bool, error) {
	got, err := c.ContainerInspect(ctx, id, client.ContainerInspectOptions{})
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
	rec := Record{PID: ct.State.Pid, Name: strings.TrimPrefix(ct.Name, "/"), RuntimeID: ct.ID}
	if ct.Config == nil {
		return rec, true, nil
	}
	rec.Image = ct.Config.Image
	image := ct.Config.Labels
	if ct.Image == "" {
		image = nil // Podman's --rootfs
	} else if byID := unnamed(rec.Image, ct.Image); len(image) > 0 || byID {
		got, err := c.ImageInspect(ctx, ct.Image)
		switch {
		case errdefs.IsNotFound(err): // it was removed: any of them may be its own
		case err != nil:
			return Record{}, false, err
		case got.Config != nil:
			image = got.Config.Labels
		default:
			image = nil
		}
		if byID {
			rec.ImageNames = append(got.RepoTags, got.RepoDigests...)
		}
	}
	rec.Labels, rec.ImageLabels = part(ct.Config.Labels, image)
	rec.Pod, rec.Namespace = rec.Labels[podLabel], rec.Labels[namespaceLabel]
	return rec, true, nil
}

// unnamed says whether a reference gives an image by its id or digest, whose names
// only the engine knows.
func unnamed(ref, id string) bool {
	id = strings.TrimPrefix(id, "sha256:")
	short := strings.TrimPrefix(ref, "sha256:")
	return strings.Contains(ref, "@") || len(short) >= minID && strings.HasPrefix(id, short)
}

// minID is how few digits of an id are taken for one. An image may be called
// cafe, and Docker prints twelve.
const minID = 6

// part parts labels into those that other does not have with the same value, and
// those that it has. A runtime merges the labels of an image into its
// container's, where nothing but the value tells whose one is.
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
