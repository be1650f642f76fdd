package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead-project/fairlead/discover"
)

// InCluster as Kubeconfig selects the service account of the agent's own pod.
const InCluster = "in-cluster"

// mirrorOf is kubelet's annotation of a mirror pod: the UID that the runtime knows.
const mirrorOf = "kubernetes.io/config.mirror"

// gather is the time for which changes are collected.
const gather = 20 * time.Millisecond

// APIServer is the source for the current labels and annotations of the pods of one node. It
// watches their metadata, and needs the permission to list and watch pods.
type APIServer struct {
	Kubeconfig string // path, or InCluster
	Node       string // the node's name
}

var _ discover.PodSource = APIServer{}

// Name implements discover.PodSource.
func (APIServer) Name() string { return "api-server" }

// Run implements discover.PodSource. It retries a kubeconfig that cannot be read. It ignores news,
// because the API server reports each change by itself.
func (a APIServer) Run(ctx context.Context, _ <-chan struct{}, publish func(discover.PodReport)) error {
	for {
		client, answered, err := a.connect()
		if err == nil {
			return a.watch(ctx, client, answered, publish)
		}
		publish(discover.PodReport{Err: fmt.Errorf("connect to the API server: %w", err)})
		select {
		case <-time.After(maxPause):
		case <-ctx.Done():
			return nil
		}
	}
}

// connect makes a client. A value arrives in answered when the API server grants a watch: it may
// grant lists, and then refuse the watch after each.
func (a APIServer) connect() (client metadata.Interface, answered chan struct{}, err error) {
	var config *rest.Config
	if a.Kubeconfig == InCluster {
		config, err = rest.InClusterConfig()
	} else {
		config, err = clientcmd.BuildConfigFromFlags("", a.Kubeconfig)
	}
	if err != nil {
		return nil, nil, err
	}
	config.UserAgent = "fairlead"
	answered = make(chan struct{}, 1)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			resp, err := next.RoundTrip(req)
			if err == nil && resp.StatusCode == http.StatusOK && req.URL.Query().Get("watch") != "" {
				signal(answered)
			}
			return resp, err
		})
	})
	client, err = metadata.NewForConfig(config)
	return client, answered, err
}

type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return r(req) }

// signal puts a value into a channel that holds one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (a APIServer) watch(ctx context.Context, client metadata.Interface, answered <-chan struct{}, publish func(discover.PodReport)) error {
	pods := client.Resource(schema.GroupVersionResource{Version: "v1", Resource: "pods"})
	own := fields.OneTermEqualSelector("spec.nodeName", a.Node).String()
	informer := cache.NewSharedIndexInformer(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = own
			return pods.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = own
			return pods.Watch(ctx, o)
		},
	}, &metav1.PartialObjectMetadata{}, 0, cache.Indexers{})
	changed, failed := make(chan struct{}, 1), make(chan error)
	change := func() { signal(changed) }
	_, err1 := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { change() }, UpdateFunc: func(any, any) { change() }, DeleteFunc: func(any) { change() },
	})
	err2 := informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, _ *cache.Reflector, err error) {
		if apierrors.IsResourceExpired(err) || errors.Is(err, io.EOF) {
			return // the informer lists again, and watches from there
		}
		select {
		case failed <- err:
		case <-ctx.Done():
		}
	})
	err3 := informer.SetTransform(strip)
	if err := errors.Join(err1, err2, err3); err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	done := make(chan struct{})
	go func() { defer close(done); informer.RunWithContext(ctx) }()
	defer func() { <-done }()

	// A node without pods causes no event.
	synced := make(chan struct{})
	go func() {
		if cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
			close(synced)
		}
	}()
	var broken error
	for {
		select {
		case <-synced:
			synced = nil
		case err := <-failed:
			broken = fmt.Errorf("watch the pods of node %s: %w", a.Node, err)
			publish(discover.PodReport{Err: broken})
			continue
		case <-answered:
			if broken == nil {
				continue
			}
			broken = nil
		case <-changed:
		case <-ctx.Done():
			return nil
		}
		select {
		case <-time.After(gather):
		case <-ctx.Done():
			return nil
		}
		if informer.HasSynced() {
			publish(discover.PodReport{Pods: podsNow(informer.GetStore().List()), Err: broken})
		}
	}
}

// strip removes unused fields from an object before it is cached.
func strip(obj any) (any, error) {
	if m, ok := obj.(*metav1.PartialObjectMetadata); ok {
		m.ManagedFields, m.OwnerReferences, m.Finalizers = nil, nil, nil
	}
	return obj, nil
}

func podsNow(objects []any) (pods []discover.Pod) {
	for _, o := range objects {
		if m, ok := o.(*metav1.PartialObjectMetadata); ok {
			pods = append(pods, discover.Pod{
				Namespace: m.Namespace, Name: m.Name, UID: cmp.Or(m.Annotations[mirrorOf], string(m.UID)),
				Labels: m.Labels, Annotations: m.Annotations, Current: true,
			})
		}
	}
	return pods
}
