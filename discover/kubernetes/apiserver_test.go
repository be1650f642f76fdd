package kubernetes

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// fakeAPI is the pods of an API server, as list and watch of their metadata.
type fakeAPI struct {
	t *testing.T

	mu      sync.Mutex
	version int
	pods    map[string]*metav1.PartialObjectMetadata
	deny    bool
	noWatch bool
	lists   int
	watches map[chan metav1.WatchEvent]bool
	hangUp  chan struct{} // closed to end the watches
}

func newFakeAPI(t *testing.T) *fakeAPI {
	return &fakeAPI{
		t: t, version: 1, pods: make(map[string]*metav1.PartialObjectMetadata),
		watches: make(map[chan metav1.WatchEvent]bool), hangUp: make(chan struct{}),
	}
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	f.mu.Lock()
	deny := f.deny || f.noWatch && q.Get("watch") != ""
	f.mu.Unlock()
	if r.URL.Path != "/api/v1/pods" || q.Get("fieldSelector") != "spec.nodeName=n1" || r.Header.Get("Authorization") != "Bearer secret" {
		f.t.Errorf("unexpected request %s, authorization %q", r.URL, r.Header.Get("Authorization"))
		http.Error(w, "unexpected", http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if deny || q.Get("sendInitialEvents") != "" { // the latter as a server that cannot do that
		w.WriteHeader(http.StatusForbidden)
		json.NewEncoder(w).Encode(metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Reason: metav1.StatusReasonForbidden,
			Code: http.StatusForbidden, Message: "pods is forbidden",
		})
		return
	}
	if q.Get("watch") == "" {
		f.list(w)
		return
	}
	events := make(chan metav1.WatchEvent, 16)
	f.mu.Lock()
	expired := q.Get("resourceVersion") != fmt.Sprint(f.version)
	f.watches[events] = true
	hangUp := f.hangUp
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.watches, events)
	}()
	if expired { // it keeps no events for those who were not there
		w.WriteHeader(http.StatusGone)
		json.NewEncoder(w).Encode(metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Reason: metav1.StatusReasonExpired,
			Code: http.StatusGone, Message: "too old resource version",
		})
		return
	}
	w.(http.Flusher).Flush()
	for {
		select {
		case ev := <-events:
			json.NewEncoder(w).Encode(ev)
			w.(http.Flusher).Flush()
		case <-hangUp:
			return
		case <-r.Context().Done():
			return
		}
	}
}

func (f *fakeAPI) list(w http.ResponseWriter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lists++
	out := metav1.PartialObjectMetadataList{
		TypeMeta: metav1.TypeMeta{Kind: "PartialObjectMetadataList", APIVersion: "meta.k8s.io/v1"},
		ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(f.version)},
		Items:    []metav1.PartialObjectMetadata{},
	}
	for _, p := range f.pods {
		out.Items = append(out.Items, *p)
	}
	json.NewEncoder(w).Encode(out)
}

// set changes a pod, or with a nil map of annotations removes it.
func (f *fakeAPI) set(name, uid string, labels, annotations map[string]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	kind := "MODIFIED"
	p := f.pods[name]
	if p == nil {
		kind = "ADDED"
	}
	if annotations == nil {
		kind = "DELETED"
		delete(f.pods, name)
	} else {
		p = &metav1.PartialObjectMetadata{
			TypeMeta:   metav1.TypeMeta{Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/v1"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(uid), Labels: labels, Annotations: annotations},
		}
		f.pods[name] = p
	}
	p.ResourceVersion = fmt.Sprint(f.version)
	data, err := json.Marshal(p)
	testkit.Must(f.t, err)
	for w := range f.watches {
		ev := metav1.WatchEvent{Type: kind}
		ev.Object.Raw = data
		w <- ev
	}
}

func (f *fakeAPI) denyAll(deny bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deny = deny
	close(f.hangUp)
	f.hangUp = make(chan struct{})
}

// serve returns the kubeconfig for it.
func (f *fakeAPI) serve(t *testing.T) (config string) {
	t.Helper()
	s := httptest.NewTLSServer(f) // a token is sent to no other
	t.Cleanup(s.Close)
	t.Cleanup(func() { f.denyAll(true) })
	config = filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
		"clusters": [{"name": "c", "cluster": {"server": %q, "certificate-authority-data": %q}}],
		"users": [{"name": "u", "user": {"token": "secret"}}]}`, s.URL,
		base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})))
	testkit.Must(t, os.WriteFile(config, []byte(text), 0o600))
	return config
}

// TestAPIServer changes annotations of a pod, among them those of a mirror pod, has another one end,
// and loses the right to watch for a while.
func TestAPIServer(t *testing.T) {
	f := newFakeAPI(t)
	f.set("web-0", "u1", map[string]string{"app": "web"}, map[string]string{"fairlead.net.rate": "5mbit"})
	f.set("etcd-n1", "u2", nil, map[string]string{mirrorOf: "hash"})
	config := f.serve(t)
	reports, _ := run(t, APIServer{Kubeconfig: config, Node: "n1"})
	web := func(annotations map[string]string) discover.Pod {
		return discover.Pod{Namespace: "shop", Name: "web-0", UID: "u1", Labels: map[string]string{"app": "web"}, Annotations: annotations, Current: true}
	}
	etcd := discover.Pod{Namespace: "shop", Name: "etcd-n1", UID: "hash", Annotations: map[string]string{mirrorOf: "hash"}, Current: true}
	has := func(want ...discover.Pod) func(discover.PodReport) bool {
		return func(r discover.PodReport) bool {
			by := func(pods []discover.Pod) map[string]discover.Pod {
				m := make(map[string]discover.Pod)
				for _, p := range pods {
					m[p.Name] = p
				}
				return m
			}
			return r.Err == nil && cmp.Diff(by(want), by(r.Pods)) == ""
		}
	}
	reports.await(t, "the pods", has(web(map[string]string{"fairlead.net.rate": "5mbit"}), etcd))
	f.set("web-0", "u1", map[string]string{"app": "web"}, map[string]string{"fairlead.net.rate": "9mbit"})
	reports.await(t, "the change", has(web(map[string]string{"fairlead.net.rate": "9mbit"}), etcd))
	f.set("etcd-n1", "u2", nil, nil)
	reports.await(t, "the end", has(web(map[string]string{"fairlead.net.rate": "9mbit"})))

	f.denyAll(true)
	reports.await(t, "the refusal", func(r discover.PodReport) bool { return r.Err != nil })
	f.set("web-0", "u1", map[string]string{"app": "web"}, map[string]string{})
	f.denyAll(false)
	reports.await(t, "the right again", has(web(nil)))
}

// TestListsAlone has the right to list pods, and not to watch them: that stays an error, though each
// list is answered, until the right is given.
func TestListsAlone(t *testing.T) {
	f := newFakeAPI(t)
	f.noWatch = true
	lists := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.lists
	}
	reports, _ := run(t, APIServer{Kubeconfig: f.serve(t), Node: "n1"})
	reports.await(t, "the refusal", func(r discover.PodReport) bool { return r.Err != nil })
	until := lists() + 2
	reports.await(t, "more lists", func(r discover.PodReport) bool {
		testkit.Fails(t, fmt.Sprintf("after the refusal it answers: %+v", r), r.Err)
		return lists() >= until
	})
	f.mu.Lock()
	f.noWatch = false
	f.mu.Unlock()
	reports.await(t, "the right", func(r discover.PodReport) bool { return r.Err == nil })
}

// A kubeconfig that is not there is no end: it may come.
func TestNoKubeconfig(t *testing.T) {
	reports, _ := run(t, APIServer{Kubeconfig: filepath.Join(t.TempDir(), "none"), Node: "n1"})
	reports.await(t, "the reason", func(r discover.PodReport) bool { return r.Err != nil })
}
