package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
)

var update = flag.Bool("update", false, "write what the commands of docs/questions print into the pages")

var (
	// question is a block of a page with a command and what it prints.
	question = regexp.MustCompile("(?ms)^```\n\\$ (fairlead [^\n]*)\n(.*?)^```$")
	// named is a file that the page shows.
	named = regexp.MustCompile("(?ms)^```yaml\n# ([\\w-]+\\.yaml)\n(.*?)^```$")
)

// TestQuestions runs the commands of the pages against the agent of an invented host, and compares
// what they print with what the pages show. -update writes it there.
func TestQuestions(t *testing.T) {
	folder, err := filepath.Abs("../../docs/questions")
	must(t, err)
	pages, err := filepath.Glob(folder + "/*.md")
	if err != nil || len(pages) < 6 {
		t.Fatalf("pages %q, %v", pages, err)
	}
	for _, name := range pages {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".md"), func(t *testing.T) {
			page, err := os.ReadFile(name)
			must(t, err)
			t.Chdir(t.TempDir())
			for _, m := range named.FindAllSubmatch(page, -1) {
				must(t, os.WriteFile(string(m[1]), m[2], 0o644))
			}
			if !question.Match(page) {
				t.Error("no command")
			}
			is := question.ReplaceAllFunc(page, func(block []byte) []byte {
				m := question.FindSubmatch(block)
				return fmt.Appendf(nil, "```\n$ %s\n%s```", m[1], answer(t, string(m[1])))
			})
			if *update {
				err = os.WriteFile(name, is, 0o644)
			} else if !bytes.Equal(is, page) {
				verbtest.Compare(t, string(page), string(is))
			}
			must(t, err)
		})
	}
}

// answer is what a command prints.
func answer(t *testing.T, command string) string {
	t.Helper()
	args := strings.Fields(command)[1:]
	var errs bytes.Buffer
	e := cli.Env{Stdin: strings.NewReader(""), Stderr: &errs, Getenv: func(string) string { return "" }}
	verb, _, err := program(verbs()).Root(e).Find(args)
	must(t, err)
	if verb.Flags().Lookup("interval") != nil {
		args = append(args, "--interval", "100ms")
	}
	if verb.Flags().Lookup("socket") != nil {
		status, out, errs := verbtest.Against(t, run, inventedHost(), args...)
		if status != cli.Done {
			t.Fatalf("%s: status %d: %s", command, status, errs)
		}
		return out
	}
	var out bytes.Buffer
	e.Stdout, e.Args = &out, args
	if status := run(t.Context(), e); status != cli.Done {
		t.Fatalf("%s: status %d: %s", command, status, &errs)
	}
	return out.String()
}

// invented is an agent with fixed values. A verb that compares two readings gets both in turn.
type invented struct {
	verbtest.Stub
	readings map[string][]any // by feature
}

func (i invented) Report(_ context.Context, ask api.Ask) (any, error) {
	list := i.readings[ask.Feature]
	if len(list) == 0 {
		return nil, fmt.Errorf("no reading of %s", ask.Feature)
	}
	if len(list) > 1 {
		i.readings[ask.Feature] = list[1:]
	}
	return list[0], nil
}

// inventedHost is the host of the pages.
func inventedHost() serve.Backend {
	const db, ingest, web = 6656, 6657, 6658
	now := time.Now()
	first := time.Date(2026, 11, 26, 12, 0, 0, 0, time.Local)
	second := first.Add(2 * time.Second)
	done := func(feature string) api.FeatureStatus {
		return api.FeatureStatus{Feature: feature, State: api.StateDone, Since: now.Add(-190 * time.Second)}
	}
	ceils := []api.Setting{{Key: "fairlead.net.ceil", Value: "50mbit", From: "label"}, {Key: "fairlead.net.ingress.ceil", Value: "20mbit", From: "label"}}
	mirror := api.Container{
		ID: web, Name: "web", Source: "docker", Image: "nginx:1", Started: now.Add(-190 * time.Second), Policy: ceils, Features: []api.FeatureStatus{done("traffic")},
		Interfaces: []api.Interface{{Name: "eth0", Kind: "veth", Index: 2, Host: &api.HostEnd{Name: "veth3f2a1bc", Index: 7, NetNS: 12}}},
	}
	change := api.Change{Feature: "traffic", Kind: "qdisc", Object: "12/7", Before: "default", Wrote: "htb 666c:", Now: "htb 666c:", State: api.ChangeInForce, When: now.Add(-190 * time.Second), Because: ceils}
	netcpu := api.NetCPU{
		Since: first.Add(-time.Hour), Taken: second, Softirq: 1.52, Charged: 1.52, System: api.NetCPUAccount{Receive: 0.02},
		Accounts: []api.NetCPUAccount{
			{Container: ingest, Name: "ingest", Tasks: 0.3, Receive: 1.4, Own: 0.1, Taken: 0.68, Work: []api.NetCPUWork{{Direction: "receive", Protocol: "udp", Seconds: 1.4, Packets: 480_000, Bytes: 576e6}}},
			{Container: db, Name: "db", Tasks: 1, Receive: 0.06, Send: 0.04, Own: 0.1, Stolen: 0.68, StolenBy: []api.NetCPUCulprit{{Container: ingest, Name: "ingest", Seconds: 0.68}},
				Work: []api.NetCPUWork{{Direction: "receive", Protocol: "tcp", Seconds: 0.06, Packets: 9000, Bytes: 8e6}}},
		},
	}
	traffic := func(taken time.Time, dbBytes, webBytes, others uint64) api.Traffic {
		class := func(id api.ID, name string, asked *api.TrafficAsked, guaranteed, ceil, bytes uint64) api.TrafficClass {
			return api.TrafficClass{Container: id, Name: name, Uplink: "eth0", Direction: "egress", Link: 1e9, Asked: asked, Guaranteed: guaranteed, Ceil: ceil, Bytes: bytes, Packets: bytes / 1000}
		}
		return api.Traffic{Taken: taken, Classes: []api.TrafficClass{
			class(db, "db", &api.TrafficAsked{Rate: 150e6}, 150e6, 1e9, dbBytes), class(web, "web", &api.TrafficAsked{Ceil: 50e6}, 50e6, 50e6, webBytes),
			class(0, "", nil, 800e6, 1e9, others),
		}}
	}
	blockio := api.BlockIO{Taken: second, Seconds: 2, Rows: []api.BlockIORow{
		{Container: db, Name: "db", Disk: "vdb", State: "interference", Reserved: &api.BlockIOFigures{ReadIOPS: 2000}, Achieved: api.BlockIOFigures{ReadIOPS: 870}, By: "batch",
			Evidence: "its threads waited 410 ms in each second while batch ran", DeviceP50: 0.0004, DeviceP99: 0.002, QueueP50: 0.00001, QueueP99: 0.0001},
		{Container: 6659, Name: "batch", Disk: "vdb", State: "best effort", Achieved: api.BlockIOFigures{WriteIOPS: 12}, DeviceP50: 0.0006, DeviceP99: 0.003, QueueP50: 0.00001, QueueP99: 0.0001},
	}}
	return invented{
		verbtest.Stub{
			List:      []api.Container{{ID: db, Name: "db", Source: "docker", Image: "postgres:17", Started: now.Add(-time.Hour)}, mirror},
			Explained: api.Explanation{Container: mirror, Changes: []api.Change{change}},
			Reported:  api.Status{Complete: true, Policy: api.PolicyStatus{OK: true}, Features: []api.Feature{{Name: "netcpu", Support: api.Verdict{Level: api.LevelFull}}, {Name: "traffic", Support: api.Verdict{Level: api.LevelFull}}}},
		},
		map[string][]any{
			"netcpu":  {api.NetCPU{Since: netcpu.Since, Taken: first}, netcpu},
			"traffic": {traffic(first, 0, 0, 0), traffic(second, 37e6, 12e6, 160e6)},
			"blockio": {blockio},
		},
	}
}
