package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// ask sends a request to the agent's socket and returns the status and the body.
func (a *agent) ask(method, path, body string) (int, string) {
	a.t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", a.path("fairlead.sock"))
	}}}
	req, err := http.NewRequestWithContext(a.t.Context(), method, "http://fairlead"+path, strings.NewReader(body))
	must(a.t, err)
	resp, err := c.Do(req)
	must(a.t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	must(a.t, err)
	return resp.StatusCode, string(data)
}

// loads lists the running generators of this test's program.
func loads(t *testing.T) (out []string) {
	t.Helper()
	processes, err := filepath.Glob("/proc/[0-9]*")
	must(t, err)
	for _, dir := range processes {
		exe, _ := os.Readlink(dir + "/exe")
		args, _ := os.ReadFile(dir + "/cmdline")
		if exe == program && bytes.HasPrefix(args, []byte("fairlead\x00load\x00")) {
			out = append(out, string(bytes.ReplaceAll(args, []byte{0}, []byte{' '})))
		}
	}
	return out
}

// TestReservations makes, refuses, changes and ends reservations over the API. Each reservation
// counts against the others. Reservations outlive the agent but not the container.
func TestReservations(t *testing.T) {
	r := newRig(t)
	disk := testkit.NewDisk(t, 1<<20)
	db := r.Create(sandbox.Spec{Name: "e2e-db"})
	r.Create(sandbox.Spec{Name: "e2e-web", Labels: map[string]string{"fairlead.io.reserve": disk.Path + " riops=100"}})
	a := r.agent()
	a.start()
	a.stands("e2e-db", "blockio", api.StateDone)

	expect := func(method, path, body string, status int, words ...string) string {
		t.Helper()
		got, text := a.ask(method, path, body)
		if got != status {
			t.Fatalf("%s %s %.100s: %d %s, want %d", method, path, body, got, text, status)
		}
		for _, w := range words {
			if !strings.Contains(text, w) {
				t.Errorf("%s %s: %s, want %q", method, path, text, w)
			}
		}
		return text
	}
	reserve := func(container, figures string) string {
		return fmt.Sprintf(`{"container": %q, "device": %q, %s}`, container, disk.Path, figures)
	}
	// Without a capacity the reservation is in force, and says what to do.
	unverified := expect("POST", "/v1/reservations", reserve("e2e-db", `"read_iops": 1`), 201, `"admission":"unverified"`, "fairlead io calibrate "+disk.Path)
	mustSay(t, a.run("ps"), 0, "partly", "unverified")
	mustSay(t, a.run("io"), 0, "unverified", "fairlead io calibrate "+disk.Path)
	mustSay(t, a.run("explain", "e2e-db"), 0, "unverified", "fairlead io calibrate "+disk.Path)
	var made0 api.Reservation
	must(t, json.Unmarshal([]byte(unverified), &made0))
	mustSay(t, a.run("io", "capacity", disk.Path, "riops=1000", "wiops=1000"), 0, "1.00kr 1.00kw", "given by an operator")
	expect("GET", "/v1/reservations/"+made0.ID, "", 200, `"admission":"verified"`)
	expect("DELETE", "/v1/reservations/"+made0.ID, "", 200)
	a.stands("e2e-web", "blockio", api.StateDone)

	expect("POST", "/v1/reservations", reserve("nobody", `"read_iops": 1`), 404)
	expect("POST", "/v1/reservations", reserve("e2e-db", `"read_iops": 801`), 409, "80.0% of its capacity left (800 read or 800 write operations per second), and 80.1% are asked for", `\"e2e-web\"`, "holds 10.0%")
	made := expect("POST", "/v1/reservations", reserve("e2e-db", `"read_iops": 700`), 201, `"read_iops":700`, `"from":"set by uid 0`)
	list, err := a.api.Reservations(t.Context())
	must(t, err)
	if len(list.Reservations) != 2 || list.Reservations[0].Name != "e2e-db" || !strings.Contains(made, list.Reservations[0].ID) {
		t.Fatalf("reservations %+v", list)
	}
	own, labelled := "/v1/reservations/"+list.Reservations[0].ID, "/v1/reservations/"+list.Reservations[1].ID
	expect("PATCH", own, `{"read_iops": 801}`, 409)
	expect("GET", own, "", 200, `"read_iops":700`)
	expect("PATCH", own, `{"read_iops": 700, "write_iops": 100}`, 200, `"write_iops":100`)
	expect("DELETE", labelled, "", 409, "label")

	a.kill()
	a.start()
	a.stands("e2e-db", "blockio", api.StateDone)
	a.stands("e2e-web", "blockio", api.StateDone)
	expect("GET", own, "", 200, `"read_iops":700`, `"write_iops":100`)
	mustSay(t, a.run("reserve"), 0, "e2e-db", "700r 100w", "80.0 %")
	mustSay(t, a.run("io"), 0, "e2e-db", "700r 100w", "idle")
	mustSay(t, a.run("io", "--devices"), 0, "90 %", "10 %")
	mustSay(t, a.run("io", "events"), 0, "Nothing has happened.")
	expect("DELETE", own, "", 200)
	expect("GET", own, "", 404)
	expect("POST", "/v1/reservations", reserve("e2e-db", `"read_iops": 800`), 201)

	// A reservation ends with its container.
	must(t, db.Destroy())
	await(t, "the reservation ends with its container", func() error {
		if list, err = a.api.Reservations(t.Context()); err == nil && len(list.Reservations) != 1 {
			err = fmt.Errorf("reservations %+v", list)
		}
		return err
	})

	// An operator calibrates the disk, follows what happens, and loses the disk.
	mustSay(t, a.run("io", "calibrate", disk.Path, "--raw", "--for", "100ms"), 1, "nothing was written")
	mustSay(t, a.run("io", "calibrate", disk.Path, "--raw", "--yes-destroy-data", "--for", "100ms"), 0, "measured")
	mustSay(t, a.run("io", "calibrate", disk.Path, "--raw", "--realtime"), 1, "profile", "loop device")
	mustSay(t, a.run("io", "calibrate", disk.Path), 2, "either --scratch DIRECTORY or --raw")
	mustSay(t, a.run("io", "calibrate", disk.Path, "--scratch", "/proc", "--for", "100ms"), 1, "is not on")
	mustSay(t, a.run("io", "-v"), 0, "SOURCE", "softirq")
	disk.Close()
	expect("GET", labelled, "", 200, `"state":"lost"`)
	mustSay(t, a.run("reserve"), 0, "lost")
	mustSay(t, a.run("io"), 0, "lost", "is not the disk any more")
	a.stop()
}

// TestCalibrateRealtime measures a profile of real-time budgets on the machine's disk, and derives
// a container's budget from it. The measurement leaves nothing behind.
func TestCalibrateRealtime(t *testing.T) {
	dir := t.TempDir()
	var st unix.Stat_t
	must(t, unix.Stat(dir, &st))
	d, err := block.Find("/sys", unix.Major(st.Dev), unix.Minor(st.Dev))
	if err != nil {
		testkit.Skip(t, "no disk below the directory of temporary files")
	}
	r := newRig(t)
	r.Create(sandbox.Spec{Name: "e2e-db"})
	a := r.agent()
	a.start()
	path := "/dev/" + d.Name
	// Start it as people do, without startAtOnce: the load beside which it measures would inherit
	// the precedence.
	calibrate := exec.Command(program, "io", "calibrate", path, "--scratch", dir, "--size", "16", "--for", "200ms", "--realtime", "--socket", a.path("fairlead.sock"))
	mustSay(t, runCommand(t, calibrate), 0, "measured", "real-time for 20ms", "real-time for 400ms")
	left, err := os.ReadDir(dir)
	must(t, err)
	if more := loads(t); len(left)+len(more) > 0 {
		t.Errorf("the measurement left %v and %v", left, more)
	}
	a.stands("e2e-db", "blockio", api.StateDone)
	mustSay(t, a.run("reserve", "e2e-db", path, "riops=10"), 0)
	mustSay(t, a.run("set", "e2e-db", "io.realtime=auto", "io.help=realtime"), 0)
	mustSay(t, a.run("io"), 0, "e2e-db: real-time for")
	a.stop()
}
