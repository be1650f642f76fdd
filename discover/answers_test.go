package discover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/google/go-cmp/cmp"
)

// fakeEngine answers as a Docker Engine does, with JSON by path.
type fakeEngine struct {
	host    string
	answers map[string]any // an error: that one
	images  atomic.Int64   // questions about them

	mu     sync.Mutex // guards answers and events
	events []any
	told   chan struct{} // there are more events
}

// newFakeEngine serves containers, by id, as they are inspected.
func newFakeEngine(t *testing.T, containers map[string]any, images map[string]any) *fakeEngine {
	t.Helper()
	e := &fakeEngine{host: "unix://" + filepath.Join(t.TempDir(), "s"), answers: make(map[string]any), told: make(chan struct{}, 1)}
	var list []any
	for id, c := range containers {
		e.answers["/containers/"+id+"/json"] = c
		m, ok := c.(map[string]any)
		if !ok {
			m = map[string]any{"Config": map[string]any{}}
		}
		list = append(list, map[string]any{"Id": id, "Labels": m["Config"].(map[string]any)["Labels"]})
	}
	e.answers["/containers/json"] = list
	for id, i := range images {
		e.answers["/images/"+id+"/json"] = i
	}
	l, err := net.Listen("unix", strings.TrimPrefix(e.host, "unix://"))
	must(t, err)
	s := &http.Server{Handler: e}
	go s.Serve(l)
	t.Cleanup(func() { s.Close() })
	return e
}

func (e *fakeEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	if rest, ok := strings.CutPrefix(path, "/v"); ok {
		path = rest[strings.Index(rest, "/"):]
	}
	for _, key := range []string{"platform", "filters"} {
		if v := r.URL.Query().Get(key); v != "" && path != "/events" {
			path += " " + v
		}
	}
	w.Header().Set("Api-Version", "1.50")
	w.Header().Set("Content-Type", "application/json")
	if strings.HasPrefix(path, "/images/") {
		e.images.Add(1)
	}
	e.mu.Lock()
	answer := e.answers[path]
	e.mu.Unlock()
	switch answer := answer.(type) {
	case error:
		http.Error(w, `{"message":"`+answer.Error()+`"}`, http.StatusInternalServerError)
	case nil:
		switch path {
		case "/_ping":
		case "/events":
			w.(http.Flusher).Flush()
			for {
				select {
				case <-e.told:
				case <-r.Context().Done():
					return
				}
				e.mu.Lock()
				for _, ev := range e.events {
					json.NewEncoder(w).Encode(ev)
				}
				e.events = nil
				e.mu.Unlock()
				w.(http.Flusher).Flush()
			}
		default:
			http.Error(w, `{"message":"no such thing"}`, http.StatusNotFound)
		}
	default:
		json.NewEncoder(w).Encode(answer)
	}
}

// inspected is what an engine says of a container that runs; its process is ours.
func inspected(id, image string, labels map[string]string) map[string]any {
	return map[string]any{
		"Id": id, "Name": "/" + id, "Image": image,
		"State":  map[string]any{"Running": true, "Pid": os.Getpid()},
		"Config": map[string]any{"Image": image + ":latest", "Labels": labels},
	}
}

func imageOf(labels map[string]string) map[string]any {
	return map[string]any{"Os": "linux", "Architecture": "amd64", "Config": map[string]any{"Labels": labels}}
}

// report runs the source of an engine until a report is as it should be, and gives its records by
// name.
func (e *fakeEngine) report(t *testing.T, ok func(Report) bool) map[string]Record {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	reports, done := make(chan Report), make(chan error, 1)
	go func() { done <- Docker(e.host).Run(ctx, into(ctx, reports)) }()
	for rep := range reports {
		if ok(rep) {
			cancel()
			testkit.Check(t, <-done)
			byName := make(map[string]Record)
			for _, rec := range rep.Records {
				byName[rec.Name] = rec
			}
			return byName
		}
	}
	return nil
}

// into publishes reports to a channel, until ctx ends.
func into(ctx context.Context, reports chan<- Report) func(Report) {
	return func(rep Report) {
		select {
		case reports <- rep:
		case <-ctx.Done():
		}
	}
}

func wholeList(rep Report) bool { return rep.Err == nil && !rep.Partial }

// labelsOf makes labels of so many bytes each.
func labelsOf(n, size int) map[string]string {
	labels := make(map[string]string, n)
	for i := range n {
		labels[fmt.Sprintf("a%07d", i)] = strings.Repeat("x", size-8)
	}
	return labels
}

// TestEngineBounded has images with labels larger than what is read of one, or than what is kept.
func TestEngineBounded(t *testing.T) {
	t.Parallel()
	monster, large := labelsOf(17, maxAnswer/16), labelsOf(container.MaxLabels, 2000)
	own := map[string]string{"fairlead.net.weight": "2"}
	e := newFakeEngine(t, map[string]any{
		"monster": inspected("monster", "m", merged(monster, own)),
		"large":   inspected("large", "l", merged(large, own)),
		"small":   inspected("small", "s", own),
	}, map[string]any{"m": imageOf(monster), "l": imageOf(large), "s": imageOf(nil)})
	got := e.report(t, wholeList)
	if rec := got["small"]; !cmp.Equal(rec.Labels, own) || rec.LeftOut != nil {
		t.Errorf("small: %+v", rec)
	}
	if rec := got["large"]; !cmp.Equal(rec.Labels, own) || len(rec.LeftOut) == 0 {
		t.Errorf("large: labels %v, left out %d", rec.Labels, len(rec.LeftOut))
	}
	size := 0
	for k, v := range got["large"].ImageLabels {
		size += len(k) + len(v)
	}
	if size == 0 || size > container.MaxAll {
		t.Errorf("%d bytes are kept of an image's labels", size)
	}
	want := Record{PID: os.Getpid(), Name: "monster", RuntimeID: "monster", Image: "m:latest", LeftOut: map[string]int{allLabels: maxAnswer}}
	testkit.Same(t, "monster", want, got["monster"])
}

// TestEngineLongList has a list, and an event, that are larger than what is read in outline, but
// for the labels.
func TestEngineLongList(t *testing.T) {
	t.Parallel()
	monster := labelsOf(17, maxOutline/16)
	e := newFakeEngine(t, map[string]any{"monster": inspected("monster", "m", monster)}, nil)
	event := map[string]any{"Type": "container", "Action": "start", "Actor": map[string]any{"ID": "late", "Attributes": monster}}
	e.report(t, func(rep Report) bool {
		if rep.Err != nil {
			t.Error(rep.Err)
			return true
		}
		switch {
		case len(rep.Records) == 1 && event != nil:
			e.mu.Lock()
			e.answers["/containers/late/json"] = inspected("late", "", nil)
			e.events, event = append(e.events, event), nil
			e.mu.Unlock()
			e.told <- struct{}{}
		case len(rep.Records) == 2:
			return true
		}
		return false
	})
}

// TestEngineImages looks at an image once, however many containers are made of it, and at the
// platform that a container was made of.
func TestEngineImages(t *testing.T) {
	containers := make(map[string]any)
	for i := range 100 {
		containers[fmt.Sprint("c", i)] = inspected(fmt.Sprint("c", i), "one", map[string]string{"fairlead.net.weight": "9", "own": "x"})
	}
	foreign := func(id, arch string) map[string]any {
		c := inspected(id, "index", map[string]string{"fairlead.net.weight": "9", "own": "x"})
		c["ImageManifestDescriptor"] = map[string]any{"digest": "sha256:" + arch, "platform": map[string]string{"os": "linux", "architecture": arch}}
		return c
	}
	containers["native"], containers["foreign"] = foreign("native", "amd64"), foreign("foreign", "arm64")
	label := map[string]string{"fairlead.net.weight": "9"}
	e := newFakeEngine(t, containers, map[string]any{
		"one": imageOf(label), "index": imageOf(nil),
	})
	e.answers[`/images/index/json {"architecture":"arm64","os":"linux"}`] = imageOf(label)
	got := e.report(t, wholeList)
	for _, name := range []string{"c0", "c99", "foreign"} {
		if rec := got[name]; !cmp.Equal(rec.ImageLabels, label) || !cmp.Equal(rec.Labels, map[string]string{"own": "x"}) {
			t.Errorf("%s: labels %v, of its image %v", name, rec.Labels, rec.ImageLabels)
		}
	}
	if rec := got["native"]; len(rec.ImageLabels) != 0 || len(rec.Labels) != 2 {
		t.Errorf("native: labels %v, of its image %v", rec.Labels, rec.ImageLabels)
	}
	testkit.Same(t, "questions about images", int64(4), e.images.Load())
}

// TestEngineImageNames has images with names that only the engine knows: one with labels larger
// than what is read of one, and one that it cannot describe.
func TestEngineImageNames(t *testing.T) {
	t.Parallel()
	named := func(labels map[string]string, tags, digests []string) map[string]any {
		i := imageOf(labels)
		i["RepoTags"], i["RepoDigests"] = tags, digests
		return i
	}
	byID := func(id, image string) map[string]any {
		c := inspected(id, image, map[string]string{"own": "x"})
		c["Config"].(map[string]any)["Image"] = image
		return c
	}
	monster, plain, bad := strings.Repeat("0a", 32), strings.Repeat("1b", 32), strings.Repeat("2c", 32)
	e := newFakeEngine(t, map[string]any{
		"monster": byID("monster", monster), "plain": byID("plain", plain), "bad": byID("bad", bad), "gone": byID("gone", strings.Repeat("3d", 32)),
		"named": inspected("named", plain, nil),
	}, map[string]any{
		monster: named(labelsOf(17, maxAnswer/16), []string{"m:1", strings.Repeat("x", 2*maxName)}, []string{"m@sha256:" + monster}),
		plain:   named(nil, []string{"p:1", "p:2"}, nil),
		bad:     errors.New("database is locked"),
	})
	got := e.report(t, func(rep Report) bool { return rep.Err != nil && len(rep.Records) == 5 })
	for name, want := range map[string][]string{"monster": {"m:1", "m@sha256:" + monster}, "plain": {"p:1", "p:2"}, "bad": nil, "gone": nil, "named": nil} {
		if rec := got[name]; !slices.Equal(rec.ImageNames, want) || rec.Unread != (name == "bad") {
			t.Errorf("%s: names %q, want %q; unread: %v", name, rec.ImageNames, want, rec.Unread)
		}
	}
}

// TestEngineFails has an engine that cannot say everything.
func TestEngineFails(t *testing.T) {
	t.Parallel()
	labels := map[string]string{"fairlead.net.weight": "9"}
	e := newFakeEngine(t, map[string]any{
		"fine":   inspected("fine", "ok", labels),
		"broken": errors.New("no space left on device"),
		"locked": inspected("locked", "bad", labels),
		"ended":  nil,
	}, map[string]any{"ok": imageOf(nil), "bad": errors.New("database is locked")})
	got := e.report(t, func(rep Report) bool {
		return rep.Partial && len(rep.Records) == 2 && rep.Err != nil && strings.Contains(rep.Err.Error(), "container broken: ") && strings.Contains(rep.Err.Error(), "1 more")
	})
	testkit.Same(t, "labels of fine", labels, got["fine"].Labels)
	if rec := got["locked"]; !cmp.Equal(rec.ImageLabels, labels) || !rec.Unread {
		t.Errorf("locked: %+v", rec)
	}
}

// TestEnginePods has labels of a pod on containers of Docker: they make one where the cgroup's
// parent is what cri-dockerd makes for a pod.
func TestEnginePods(t *testing.T) {
	labels := map[string]string{podLabel: "web-0", namespaceLabel: "prod", uidLabel: "1a-2b"}
	in := func(id, parent string) map[string]any {
		c := inspected(id, "i", labels)
		c["HostConfig"] = map[string]any{"CgroupParent": parent}
		return c
	}
	e := newFakeEngine(t, map[string]any{
		"pod": in("pod", "kubepods-burstable-pod1a_2b.slice"), "forged": in("forged", ""), "other": in("other", "/kubepods/pod3c"),
	}, map[string]any{"i": imageOf(nil)})
	got := e.report(t, wholeList)
	for name, want := range map[string][3]string{"pod": {"prod", "web-0", "kubepods-burstable-pod1a_2b.slice"}, "forged": {}, "other": {}} {
		if rec := got[name]; rec.RuntimeID != name || [3]string{rec.Namespace, rec.Pod, rec.PodCgroup} != want {
			t.Errorf("%s is %+v, want %q", name, rec, want)
		}
	}
}

// TestEngineCreated has a container created, started and ended. Before the start it is only listed:
// an engine that starts one holds back the answer to an inspection.
func TestEngineCreated(t *testing.T) {
	e := newFakeEngine(t, nil, map[string]any{"sha256:i": imageOf(map[string]string{"of": "image"})})
	labels := map[string]string{"fairlead.own": "x", "of": "image"}
	networks := map[string]any{"Networks": map[string]any{"a": map[string]any{}, "b": map[string]any{}}}
	e.answers[`/containers/json {"id":{"web":true}}`] = []any{map[string]any{
		"Id": "web", "Names": []string{"/web"}, "Image": "i:latest", "ImageID": "sha256:i", "Labels": labels, "NetworkSettings": networks,
	}}
	reports := make(chan Report)
	go Docker(e.host).Run(t.Context(), into(t.Context(), reports))
	want := Record{Name: "web", RuntimeID: "web", Image: "i:latest", Labels: map[string]string{"fairlead.own": "x"}, ImageLabels: map[string]string{"of": "image"}, Networks: 2}
	event := func(action string, running, created []Record) {
		t.Helper()
		e.mu.Lock()
		e.events = append(e.events, map[string]any{"Type": "container", "Action": action, "Actor": map[string]any{"ID": "web"}})
		e.mu.Unlock()
		e.told <- struct{}{}
		if rep := <-reports; rep.Err != nil || !cmp.Equal(rep.Records, running) || !cmp.Equal(rep.Created, created) {
			t.Errorf("after %s: %+v, want %+v and %+v", action, rep, running, created)
		}
	}
	<-reports
	event("create", nil, []Record{want})
	web := inspected("web", "sha256:i", labels)
	web["Config"].(map[string]any)["Image"] = "i:latest"
	web["NetworkSettings"] = networks
	web["State"] = map[string]any{"Running": true, "Pid": noPID}
	e.mu.Lock()
	e.answers["/containers/web/json"] = web
	e.mu.Unlock()
	ran := want
	ran.PID = noPID
	event("start", []Record{ran}, nil)
	event("die", nil, []Record{want}) // it may be started again
	event("destroy", nil, nil)
}

func TestOutline(t *testing.T) {
	long := strings.Repeat("é", maxName)
	for _, tc := range []struct{ in, want string }{
		{`[{"Id":"x","Labels":{"a":{"b":[1]}},"Ports":[{"c":1}],"n":1}]`, `[{"Id":"x","Labels":{},"Ports":[],"n":1}]`},
		{`{"Actor":{"ID":"x","Attributes":{"}":"]\""}}}` + "\n" + `{"b":2}`, `{"Actor":{"ID":"x","Attributes":{}}}` + "\n" + `{"b":2}`},
		{`{"a":"` + long + `"}`, `{"a":"` + long[:maxName] + `"}`},
		{`{"a":"` + strings.Repeat("x", maxName-1) + `\u00e9\u00e9"}`, `{"a":"` + strings.Repeat("x", maxName-1) + `\u00e9"}`},
		{`{"a":"` + strings.Repeat("x", maxName-1) + `\\\""}`, `{"a":"` + strings.Repeat("x", maxName-1) + `\\"}`},
		{`{"a":"\\"}`, `{"a":"\\"}`},
	} {
		testkit.Gives(t, tc.in[:min(60, len(tc.in))], []byte(tc.want))(io.ReadAll(&outline{r: strings.NewReader(tc.in)}))
	}
	testkit.Is(t, "too long", testkit.Err(io.ReadAll(&atMost{strings.NewReader("12345"), 4})), errAnswer)
	testkit.Gives(t, "as long as may be", []byte("1234"))(io.ReadAll(&atMost{strings.NewReader("1234"), 4}))
}

func FuzzOutline(f *testing.F) {
	f.Add([]byte(`[{"Id":"x","Labels":{"a":{"b":[1]}}}]`))
	f.Add([]byte(`{"a":"\u00e9\\\"","b":[[[]]]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := io.ReadAll(&outline{r: strings.NewReader(string(data))})
		must(t, err)
		if json.Valid(data) && !json.Valid(got) {
			t.Errorf("%q became %q", data, got)
		}
		if again, err := io.ReadAll(&outline{r: strings.NewReader(string(got))}); err != nil || json.Valid(data) && !slices.Equal(got, again) {
			t.Errorf("%q became %q", got, again)
		}
	})
}
