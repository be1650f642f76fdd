package rig

import (
	"context"
	"fmt"
	"path/filepath"
	"time"
)

// The overlay network of the path Swarm.
const (
	swarmNetwork = "flover"
	swarmSubnet  = "10.216.0.0/24"
)

// swarm starts an engine on each host, joins them to a Swarm, and starts the containers in
// an overlay network of its own.
func (o *Overlay) swarm(ctx context.Context) error {
	for _, r := range o.Hosts {
		if err := r.startEngine(ctx); err != nil {
			return err
		}
	}
	first := o.Hosts[0].engine
	if _, err := first.run(ctx, nil, "swarm", "init", "--advertise-addr", wireAddr(0)); err != nil {
		return err
	}
	token, err := first.run(ctx, nil, "swarm", "join-token", "-q", "worker")
	if err != nil {
		return err
	}
	if err := o.Hosts[1].engine.join(ctx, token, wireAddr(1), wireAddr(0)); err != nil {
		return err
	}
	if _, err := first.run(ctx, nil, "network", "create", "-d", "overlay", "--attachable", "--subnet", swarmSubnet, swarmNetwork); err != nil {
		return err
	}
	for host, r := range o.Hosts {
		if err := r.contain(ctx, 0, "--network", swarmNetwork); err != nil {
			return err
		}
		if err := manyPorts(r.Boxes[0]); err != nil {
			return err
		}
		format := fmt.Sprintf("{{(index .NetworkSettings.Networks %q).IPAddress}}", swarmNetwork)
		if o.addrs[host], err = r.engine.run(ctx, nil, "inspect", "--format", format, r.Boxes[0].Name); err != nil {
			return err
		}
		if err := r.showTunnel(); err != nil {
			return err
		}
	}
	return nil
}

// join makes the engine a worker of a Swarm; manager is the manager's address. After a while Docker
// continues to join in the background.
func (e *engine) join(ctx context.Context, token, own, manager string) error {
	_, joined := e.run(ctx, nil, "swarm", "join", "--token", token, "--advertise-addr", own, manager+":2377")
	for end := time.Now().Add(time.Minute); ; {
		state, err := e.run(ctx, nil, "info", "--format", "{{.Swarm.LocalNodeState}}")
		if err == nil && state == "active" {
			return nil
		}
		if time.Now().After(end) || state != "pending" {
			return fmt.Errorf("it is %q: %w, %w", state, joined, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// showTunnel mounts the network namespace of the overlay network where an agent sees it, as it
// would see Docker's own mount: this engine has a mount namespace of its own.
func (r *Rig) showTunnel() error {
	// Docker names the namespace of an overlay network 1- and the network's id, and the namespace
	// of its load balancer lb_ and the id.
	pattern := fmt.Sprintf("/proc/%d/root%s/exec/netns/[0-9]-*", r.engine.process.PID, r.engine.dir)
	id, err := r.engine.run(context.Background(), nil, "network", "inspect", "--format", "{{.ID}}", swarmNetwork)
	if err != nil {
		return err
	}
	found, err := filepath.Glob(pattern + id[:10])
	if err != nil || len(found) != 1 {
		return fmt.Errorf("look for the network namespace of %s: found %v in %s: %v", swarmNetwork, found, pattern, err)
	}
	return r.mount(found[0])
}
