package rig

import (
	"os"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/lab/load"
)

func TestServices(t *testing.T) {
	r := build(t, Config{Path: NIC, Unsteered: true, Containers: []Container{{Name: "server"}, {Name: "client", CPU: SenderCPU}}})
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

func TestListening(t *testing.T) {
	const head = "  sl  local_address rem_address   st tx_queue rx_queue\n"
	for line, want := range map[string]bool{
		"   0: 00000000:2328 00000000:0000 0A 00000000:00000000":                                                 true,
		"   0: 00000000000000000000000000000000:2328 00000000000000000000000000000000:0000 0A 00000000:00000000": true,
		"   0: 00000000:2328 00000000:0000 01 00000000:00000000":                                                 false,
		"   0: 00000000:2329 00000000:2328 0A 00000000:00000000":                                                 false,
		"   0: 00000000:2328": false,
		"":                    false,
	} {
		if got := socket([]byte(head+line+"\n"), 9000, listening); got != want {
			t.Errorf("%q: %v, want %v", line, got, want)
		}
	}
	for state, want := range map[string]bool{"01": true, "04": true, "06": false, "0A": false} { // established, FIN_WAIT1, TIME_WAIT, LISTEN
		if got := socket([]byte(head+"   0: 0200006F:2328 0100006F:9999 "+state+" 00000000:00000000\n"), 9000, connected); got != want {
			t.Errorf("state %s: connected is %v", state, got)
		}
	}
}

func FuzzListening(f *testing.F) {
	f.Add([]byte("   0: 00000000:2328 00000000:0000 0A 00000000:00000000\n"))
	f.Fuzz(func(t *testing.T, table []byte) {
		if socket(table, 9000, listening) && !strings.Contains(string(table), "2328") {
			t.Errorf("%q has a listener at port 9000", table)
		}
	})
}
