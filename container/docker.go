package container

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/client"
	"golang.org/x/sys/unix"
)

const (
	podmanHost  = "unix:///run/podman/podman.sock"
	relistEvery = time.Minute
	callTimeout = 10 * time.Second
	parallel    = 4 // inspections at a time
)

// Docker is the source for the containers of a Docker Engine. host is in the
// form of DOCKER_HOST ("unix:///var/run/docker.sock"); if empty, DOCKER_HOST
// itself counts, and then Docker's default.
func Docker(host string) Source {
	host = cmp.Or(host, os.Getenv("DOCKER_HOST"), client.DefaultDockerHost)
	return &engine{name: "docker", host: host}
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

	publish func(Report)
	none    bool              // it was reported that there is no such engine
	listed  bool              // a list was published, so that the engine is known to exist
	records map[string]Record // running containers, by id
	asked   map[string]int    // counts the events of each container that is being inspected
}

// inspected is what an engine says of one container now.
type inspected struct {
	id     string
	asked  int
	record Record
	runs   bool
	err    error
}

func (e *engine) Name() string { return e.name }

func (e *engine) Run(ctx context.Context, publish func(Report)) error {
	e.publish = publish
	retry(ctx, func(ctx context.Context) {
		err := e.session(ctx)
		switch {
		case ctx.Err() != nil:
		case e.listed, !absent(err):
			publish(Report{Err: fmt.Errorf("%s at %s: %w", e.name, e.host, err)})
		case !e.none:
			e.none = true
			publish(Report{})
		}
	})
	return nil
}

// absent says whether err means that nobody listens at the socket.
func absent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED)
}

// session follows the engine over one connection. It always ends with an error.
func (e *engine) session(ctx context.Context) error {
	if path, ok := strings.CutPrefix(e.host, "unix://"); ok {
		// Cheaper than asking, and the client hides the reason.
		if _, err := os.Stat(path); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c, err := client.New(client.WithHost(e.host), client.WithUserAgent("fairlead"))
	if err != nil {
		return err
	}
	defer c.Close()
	ping, cancelPing := context.WithTimeout(ctx, callTimeout)
	_, err = c.Ping(ping, client.PingOptions{NegotiateAPIVersion: true})
	cancelPing()
	if err != nil {
		return err
	}

	// Subscribed before listing, so that nothing falls between the two.
	filter := make(client.Filters).Add("type", "container").
		Add("event", "start", "die", "died", "rename", "update", "destroy", "remove")
	stream := c.Events(ctx, client.EventsListOptions{Filters: filter})
	results := make(chan inspected)
	e.records, e.asked = make(map[string]Record), make(map[string]int)
	if err := e.list(ctx, c, nil); err != nil {
		return err
	}
	relist := time.NewTicker(relistEvery)
	defer relist.Stop()
	for {
		select {
		case msg := <-stream.Messages:
			e.event(ctx, c, msg, results)
		case got := <-results:
			e.settle(got)
		case <-relist.C:
			if err := e.list(ctx, c, e.records); err != nil {
				return err
			}
		case err := <-stream.Err:
			return cmp.Or(err, errors.New("event stream ended"))
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// event notes an end at once, and has everything else looked up: the loop must
// not wait for an engine that hangs over one container.
func (e *engine) event(ctx context.Context, c *client.Client, msg events.Message, results chan<- inspected) {
	id := msg.Actor.ID
	switch msg.Action {
	case "start", "rename", "update":
		e.asked[id]++
		asked := e.asked[id]
		go func() {
			got := e.inspect(ctx, c, id)
			got.asked = asked
			select {
			case results <- got:
			case <-ctx.Done():
			}
		}()
	case "die", "died", "destroy", "remove":
		if _, waiting := e.asked[id]; waiting {
			e.asked[id]++ // the answer will be out of date
		}
		// One that was listed after a restart outlives the end before it.
		if rec, runs := e.records[id]; runs && unix.Kill(rec.PID, 0) != nil {
			delete(e.records, id)
			e.say()
		}
	}
}

// settle takes the answer to the last question about a container.
func (e *engine) settle(got inspected) {
	if e.asked[got.id] != got.asked {
		return
	}
	delete(e.asked, got.id)
	if got.err != nil {
		return // the next list will tell
	}
	if got.runs {
		e.records[got.id] = got.record
	} else {
		delete(e.records, got.id)
	}
	e.say()
}

func (e *engine) say() {
	e.publish(Report{Records: slices.Collect(maps.Values(e.records))})
	e.listed = true
}

// list asks for all containers, and inspects those that are not known or whose
// process has ended.
func (e *engine) list(ctx context.Context, c *client.Client, known map[string]Record) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	all, err := c.ContainerList(ctx, client.ContainerListOptions{})
	if err != nil {
		return err
	}
	records := make(map[string]Record, len(all.Items))
	var unknown []string
	for _, item := range all.Items[:min(len(all.Items), maxRecords)] {
		rec, ok := known[item.ID]
		if ok && unix.Kill(rec.PID, 0) == nil {
			records[item.ID] = rec
			continue
		}
		unknown = append(unknown, item.ID)
	}
	results := make(chan inspected)
	slots := make(chan struct{}, parallel)
	for _, id := range unknown {
		go func() {
			slots <- struct{}{}
			got := e.inspect(ctx, c, id)
			<-slots
			results <- got
		}()
	}
	for range unknown {
		if got := <-results; got.err == nil && got.runs {
			records[got.id] = got.record
		}
	}
	e.records = records
	e.say()
	return nil
}

func (e *engine) inspect(ctx context.Context, c *client.Client, id string) inspected {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	got, err := c.ContainerInspect(ctx, id, client.ContainerInspectOptions{})
	if err != nil {
		return inspected{id: id, err: err}
	}
	ct := got.Container
	if ct.State == nil || !ct.State.Running || ct.State.Pid <= 0 {
		return inspected{id: id}
	}
	rec := Record{PID: ct.State.Pid, Name: strings.TrimPrefix(ct.Name, "/"), RuntimeID: ct.ID}
	if ct.Config != nil {
		rec.Image, rec.Labels = ct.Config.Image, ct.Config.Labels
		rec.Pod, rec.Namespace = rec.Labels[podLabel], rec.Labels[namespaceLabel]
	}
	return inspected{id: id, record: rec, runs: true}
}
