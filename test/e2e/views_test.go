package e2e

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/record"
)

// TestViews floods a host without any policy, of which the agent knows only the cgroups of containers.
// Each view names victim and culprit: while it goes on, and ten minutes after.
func TestViews(t *testing.T) {
	r := newRig(t)
	flood := r.add(sandbox.Spec{Name: "e2e-ingest", CPU: onOne})
	victim := r.add(sandbox.Spec{Name: "e2e-db", CPU: onOne})
	must(t, r.host.SetQueues("nic0", "rx", "rps_cpus", func(int) string { return "1" }))
	before := r.state()
	a := newAgent(t, r.host)
	a.start()
	names := make(map[string]string)
	await(t, "both containers", func() error {
		list, err := a.api.Containers(t.Context())
		for _, c := range list {
			for _, b := range []string{"e2e-ingest", "e2e-db"} {
				if strings.HasSuffix(c.Name, b) && featureOf(c, "netcpu").State == api.StateDone {
					names[b] = c.Name
				}
			}
		}
		if len(names) < 2 {
			return fmt.Errorf("there are %+v (%v)", list, err)
		}
		return nil
	})
	ends := []func(){
		generate(t, flood, 0, "udp-recv"),
		generate(t, victim, 0, "burn"),
		generate(t, r.wire, 1, "udp-send", "--to", "10.66.1.1:9000", "--rate", "50000"),
	}
	slowed := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(names["e2e-db"]) + ` +[0-9]+%`)
	socket := []string{"--socket", a.path("fairlead.sock"), "--config", a.path("config.yaml"), "--record-dir", a.path("lib/record")}
	top := func(args ...string) []string { return append(append([]string{"top"}, args...), socket...) }

	await(t, "top to name the culprit", func() error { return blames(fairlead(t, top("--once", "-o", "json")...)) })
	await(t, "ps to name the victim", func() error {
		if o := a.run("ps", "--wide"); !slowed.MatchString(o.out) {
			return fmt.Errorf("%v", o)
		}
		return nil
	})
	await(t, "the recording to have them", func() error {
		return blames(fairlead(t, top("--once", "-o", "json", "--at", time.Now().Format(time.RFC3339))...))
	})
	for _, end := range ends {
		end()
	}
	// Ten minutes later.
	later := filepath.Join(t.TempDir(), "record")
	shift(t, a.path("lib/record"), later, -10*time.Minute)
	past := []string{"--at", "10 min ago", "--socket", a.path("fairlead.sock"), "--config", a.path("config.yaml"), "--record-dir", later}
	must(t, blames(fairlead(t, append([]string{"top", "--once", "-o", "json"}, past...)...)))

	mustSay(t, fairlead(t, append([]string{"report", "--since", "10m"}, socket[2:]...)...), 0, "e2e-db", "e2e-ingest")
	for _, verb := range []string{"netcpu", "traffic", "latency", "io", "overlay", "doctor"} {
		if o := a.run(verb); o.status == 2 || strings.Contains(o.err, "panic") {
			t.Errorf("%s: %v", verb, o)
		}
	}
	mustSay(t, a.run("explain", names["e2e-db"]), 0, "Nothing was changed")
	a.stop()
	r.sameAs(before, "after a clean stop")
}

// blames returns an error unless an overview blames the packets of the flood for what slows the
// victim. On a busy machine others may slow it more.
func blames(o output) error {
	var seen api.Overview
	if err := json.Unmarshal([]byte(o.out), &seen); err != nil {
		return fmt.Errorf("%w\n%v", err, o)
	}
	for _, row := range seen.Rows {
		if strings.HasSuffix(row.Name, "e2e-db") && slices.ContainsFunc(row.By, func(x api.Slowdown) bool {
			return x.Cause == api.SlowedByPackets && strings.HasSuffix(x.Name, "e2e-ingest")
		}) {
			return nil
		}
	}
	return fmt.Errorf("nobody is blamed: %v", o)
}

// shift copies a recording into another folder, as if it were made at another time.
func shift(t *testing.T, from, to string, by time.Duration) {
	t.Helper()
	in, err := record.Open(from)
	must(t, err)
	out, err := record.New(record.Config{Dir: to})
	must(t, err)
	n := 0
	for f, err := range in.Frames(t.Context(), time.Time{}, time.Time{}, 0) {
		must(t, err)
		f.Taken = f.Taken.Add(by)
		must(t, out.Write(f))
		n++
	}
	must(t, out.Close())
	if n < 2 {
		t.Fatalf("%d frames are recorded", n)
	}
}
