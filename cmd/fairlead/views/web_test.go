package views

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/test/viewtest"
)

// webStub is an agent with a victim and a culprit.
type webStub struct {
	serve.Backend
	live *viewtest.Live
}

func (s webStub) Frame(ctx context.Context) (api.Frame, error) { return s.live.Next(ctx) }
func (s webStub) Version(context.Context) (api.Version, error) { return api.Version{}, nil }
func (s webStub) Explain(context.Context, string) (api.Explanation, error) {
	return api.Explanation{Container: api.Container{Name: "db-1", Policy: []api.Setting{{Key: "fairlead.netcpu", Value: "isolate", From: "label"}}}}, nil
}

// TestWeb opens the link that the verb prints, until the page names victim and culprit.
func TestWeb(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	stub := webStub{live: &viewtest.Live{Host: viewtest.Host{Containers: 6, Begin: time.Now().Add(-time.Minute), Every: 2 * time.Second}}}
	served := verbtest.Serve(t, path, stub)
	out, in := io.Pipe()
	status := make(chan int, 1)
	var errs strings.Builder
	verb, stop := context.WithCancel(t.Context())
	go func() {
		status <- run(verb, cli.Env{Stdin: strings.NewReader(""), Stdout: in, Stderr: &errs, Getenv: func(string) string { return "" }, Args: []string{"web", "--socket", path}})
		in.Close()
	}()
	link, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("%v, status %d: %s", err, <-status, &errs)
	}
	jar, err := cookiejar.New(nil)
	must(t, err)
	client := http.Client{Jar: jar}
	get := func(address string) string {
		t.Helper()
		answer, err := client.Get(address)
		must(t, err)
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		if err != nil || answer.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v, %v: %s", address, answer.Status, err, body)
		}
		return string(body)
	}
	u, err := url.Parse(strings.TrimSpace(link))
	if err != nil || u.Hostname() != "127.0.0.1" {
		t.Fatalf("link %q: %v", link, err)
	}
	get(u.String())
	u.RawQuery = ""
	for !strings.Contains(get(u.String()), "db-1 runs ") { // the test's time is bounded
		time.Sleep(100 * time.Millisecond)
	}
	if one := get(u.String() + "c/1"); !strings.Contains(one, "flood") || !strings.Contains(one, "netcpu = isolate") {
		t.Errorf("the page of db-1: %s", one)
	}
	client.CloseIdleConnections()
	stop()
	if got := <-status; got != cli.Done {
		t.Errorf("status %d: %s", got, &errs)
	}
	served()
}

func TestWebWithoutAgent(t *testing.T) {
	for _, args := range [][]string{{"web", "--socket", filepath.Join(t.TempDir(), "none")}, {"web", "--replay", filepath.Join(t.TempDir(), "none")}} {
		if got, _, errs := verbtest.Alone(t, run, args...); got != cli.Failed || errs == "" {
			t.Errorf("%q: status %d: %s", args, got, errs)
		}
	}
}

var must = testkit.Must

func TestMain(m *testing.M) {
	testscript.Main(checked{m}, map[string]func(){"fairlead": func() {
		os.Exit(run(context.Background(), cli.Env{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Args: os.Args[1:]}))
	}})
}

// checked runs the tests and looks for objects that they left on the host.
type checked struct{ m *testing.M }

func (c checked) Run() int { return testkit.Run(c.m) }

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e) }
