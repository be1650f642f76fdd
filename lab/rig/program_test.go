package rig

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/lab/load"
)

func TestParseSysbench(t *testing.T) {
	const out = "CPU speed:\n    events per second:  12345.67\n\nGeneral statistics:\n    total time: 1.0001s\n"
	if got, err := parseSysbench(out); err != nil || got != 12345.67 {
		t.Errorf("got %v, %v", got, err)
	}
	for _, bad := range []string{"", "events per second: many", "events per second: 1.2.3\n"} {
		if got, err := parseSysbench(bad); err == nil {
			t.Errorf("parseSysbench(%q) = %v", bad, got)
		}
	}
}

func FuzzParseSysbench(f *testing.F) {
	f.Add("    events per second:  12345.67\n")
	f.Add("events per second: .\n")
	f.Fuzz(func(t *testing.T, out string) {
		if v, err := parseSysbench(out); err == nil && v < 0 {
			t.Errorf("%q has %v events per second", out, v)
		}
	})
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

// TestPrograms runs the real programs that are installed here.
func TestPrograms(t *testing.T) {
	r := build(t, Config{Path: NIC})
	for _, kind := range []Kind{Iperf3UDP, Iperf3TCP, Memcached, FIO} {
		if _, err := exec.LookPath(kind.Program()); err != nil {
			t.Logf("no %s here", kind.Program())
			continue
		}
		run, err := r.Send(t.Context(), Traffic{Kind: kind})
		if err != nil {
			t.Errorf("%s: %v", kind, err)
			continue
		}
		for _, rate := range []uint64{load.Flood, 0, load.Flood} {
			if err := run.SetRate(rate); err != nil {
				t.Errorf("%s: %v", kind, err)
			}
		}
		time.Sleep(300 * time.Millisecond)
		for _, p := range run.Programs() {
			select {
			case <-p.Done():
				t.Errorf("%s: a program has ended: %v", kind, p.Wait())
			default:
			}
		}
		if kind == Memcached && !moves(run.Senders[0]) {
			t.Error("memcached does not answer")
		}
		if err := run.Stop(); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if _, err := exec.LookPath("sysbench"); err == nil {
		if events, err := r.Sysbench(t.Context(), 0); err != nil || events <= 0 {
			t.Errorf("sysbench: %v events per second (%v)", events, err)
		}
	}
	if _, err := exec.LookPath("memcached"); err == nil {
		server, client, err := r.ServeVictim(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		client.SetRate(load.Flood)
		if !moves(client) {
			t.Error("the victim does not answer")
		}
		server.Kill()
		<-server.Done()
		if err := client.Stop(); err != nil {
			t.Error(err)
		}
	}
}
