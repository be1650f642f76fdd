// Package kubernetes reports what Kubernetes knows about the pods on this node and their runtime
// does not: the resources that kubelet gave them, and their current annotations.
//
// It finds no containers (package discover), offers kubelet nothing (agent/deviceplugin), and does
// not decide what applies to a pod (policy). Package agent passes its sources to a discover.Set.
package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/discover"
)

const (
	maxAnswer = 16 << 20 // bytes of a list; kubelet's own limit
	askTime   = 10 * time.Second

	minPause = 50 * time.Millisecond // between two questions, and after a failure
	maxPause = 10 * time.Second
)

// Kubelet is the source for the extended resources of pods, by kubelet's PodResources API.
type Kubelet struct {
	Socket string        // of that API
	Domain string        // of the resources, with its slash
	Every  time.Duration // between two queries without news; 0: 30 s
}

var _ discover.PodSource = Kubelet{}

// Name implements discover.PodSource.
func (Kubelet) Name() string { return "kubelet" }

// Run implements discover.PodSource. It asks soon after news: before a pod's containers run,
// kubelet has admitted the pod and given it its resources.
func (k Kubelet) Run(ctx context.Context, news <-chan struct{}, publish func(discover.PodReport)) error {
	// Without this authority, gRPC sends the path of the socket, which HTTP/2 servers may refuse.
	conn, err := grpc.NewClient("unix://"+k.Socket, grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return fmt.Errorf("connect to kubelet at %s: %w", k.Socket, err)
	}
	defer conn.Close()
	client := podresources.NewPodResourcesListerClient(conn)
	listed, pause := false, minPause
	for ctx.Err() == nil {
		began := time.Now()
		rep := k.ask(ctx, client)
		switch {
		case ctx.Err() != nil:
			return nil
		case rep.Err == nil:
			listed, pause = true, minPause
		case !listed && errors.Is(rep.Err, fs.ErrNotExist):
			rep = discover.PodReport{Absent: true}
			fallthrough
		default:
			conn.ResetConnectBackoff() // the pauses are our own
			pause = backoff.Next(pause, minPause, maxPause)
		}
		publish(rep)
		next := cmp.Or(k.Every, 30*time.Second)
		if rep.Err != nil || rep.Absent {
			next = pause
		}
		select {
		case <-news:
		case <-time.After(next):
		case <-ctx.Done():
		}
		// A burst of pods causes one query.
		select {
		case <-time.After(minPause - time.Since(began)):
		case <-ctx.Done():
		}
	}
	return nil
}

// ask lists the pods with resources of the domain.
func (k Kubelet) ask(ctx context.Context, client podresources.PodResourcesListerClient) discover.PodReport {
	if _, err := os.Stat(k.Socket); err != nil {
		return discover.PodReport{Err: fmt.Errorf("ask kubelet who was given what: %w", err)}
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	got, err := client.List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return discover.PodReport{Err: fmt.Errorf("ask kubelet at %s who was given what: %w", k.Socket, err)}
	}
	return discover.PodReport{Pods: podsOf(got, k.Domain)}
}

// podsOf returns the pods that have resources of a domain.
func podsOf(list *podresources.ListPodResourcesResponse, domain string) (pods []discover.Pod) {
	for _, pod := range list.GetPodResources() {
		requests := make(map[string]map[string]uint64)
		for _, ct := range pod.GetContainers() {
			of := make(map[string]uint64)
			for _, d := range ct.GetDevices() {
				if name, ours := strings.CutPrefix(d.GetResourceName(), domain); ours {
					of[name] += uint64(len(d.GetDeviceIds()))
				}
			}
			if len(of) > 0 {
				requests[ct.GetName()] = of
			}
		}
		if len(requests) > 0 {
			pods = append(pods, discover.Pod{Namespace: pod.GetNamespace(), Name: pod.GetName(), Requests: requests})
		}
	}
	return pods
}
