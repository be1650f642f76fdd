package main

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
)

// setStub is an agent that changes nothing, and reports success.
type setStub struct {
	verbtest.Stub
	features []api.FeatureStatus
	reserved []string // containers with a requested reservation
}

func (s *setStub) Set(context.Context, string, serve.Peer, api.SetRequest) (api.Container, error) {
	c := s.List[0]
	c.Features = s.features
	return c, nil
}

func (s *setStub) Restore(context.Context, string) (api.Restored, error) {
	return api.Restored{Container: 4711, Name: "web-1", Source: "docker", Outcomes: []api.Outcome{}}, nil
}

func (s *setStub) Report(_ context.Context, ask api.Ask) (any, error) {
	change, ok := ask.Body.(api.ReservationChange)
	if !ok {
		return api.BlockIO{Reservations: []api.Reservation{{ID: "4711-254-16", Container: 4711, Name: "web-1", Device: "/dev/vdb"}}}, nil
	}
	if change.Device == "/dev/vdb" && change.Replace {
		s.reserved = append(s.reserved, ask.Container)
	}
	return api.SetRequest{}, nil
}

func (s *setStub) Command(ctx context.Context, ask api.Ask) (any, error) { return s.Report(ctx, ask) }

// Every verb that changes a container names it.
func TestWhom(t *testing.T) {
	for _, args := range [][]string{
		{"set", "web-1", "net.ceil=1mbit"}, {"restore", "web-1"}, {"reserve", "web-1", "/dev/vdb", "riops=5"}, {"reserve", "--end", "4711-254-16"},
	} {
		s := &setStub{Stub: verbtest.Example()}
		status, out, errs := verbtest.Against(t, run, s, args...)
		if status != cli.Done || errs != "" || !strings.Contains(out, "web-1") || !strings.Contains(out, "4711") {
			t.Errorf("%v: %d\n%s%s", args, status, out, errs)
		}
		// The agent resolves the container's name; the verb does not search a list.
		if args[0] == "reserve" && args[1] == "web-1" && !slices.Equal(s.reserved, []string{"web-1"}) {
			t.Errorf("reserved for %q", s.reserved)
		}
	}
}
