package rig

import (
	"os"
	"testing"

	"github.com/fairlead-project/fairlead/lab/load"
)

func TestServices(t *testing.T) {
	r := build(t, Config{Path: NIC, Unsteered: true, Containers: []Container{{Name: "server"}, {Name: "client", CPU: SenderCPU}}})
	if atPort(r.Boxes[0].PID, listening) {
		t.Error("there is no server, and something listens")
	}
	for _, s := range []Service{Redis, Memcache, Nginx, Postgres} {
		if s.Program() == "" {
			t.Logf("no %s here", s)
			continue
		}
		server, err := r.Serve(t.Context(), s, r.Boxes[0])
		if err != nil {
			t.Errorf("%s: %v", s, err)
			continue
		}
		size := PageSize
		if s == Nginx {
			size = LargePage
		}
		client, err := r.Ask(t.Context(), s, 0, r.Boxes[1], 4, size)
		if err != nil {
			t.Errorf("%s: %v", s, err)
			continue
		}
		if !atPort(server.PID, listening) || !Connected(server.PID) {
			t.Errorf("%s has no listener, or no client", s)
		}
		client.SetRate(load.Flood)
		if !moves(client) {
			t.Errorf("%s does not answer", s)
		}
		if _, err := Retransmitted(client.PID); err != nil {
			t.Error(err)
		}
		if err := client.Stop(); err != nil {
			t.Error(err)
		}
		must(t, server.Stop())
	}
	if _, err := Retransmitted(os.Getpid() + 1<<30); err == nil {
		t.Error("no such process, and no error")
	}
}
