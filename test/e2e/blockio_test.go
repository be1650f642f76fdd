package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

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

	reserve := func(f api.BlockIOFigures) (api.Reservation, error) {
		return a.api.Reserve(t.Context(), api.ReservationRequest{Container: "e2e-db", Device: disk.Path, BlockIOFigures: f})
	}
	// Without a capacity the reservation is in force, and says what to do.
	first, err := reserve(api.BlockIOFigures{ReadIOPS: 1})
	must(t, err)
	mustSay(t, a.run("ps"), 0, "partly", "unverified")
	mustSay(t, a.run("io"), 0, "unverified", "fairlead io calibrate "+disk.Path)
	mustSay(t, a.run("explain", "e2e-db"), 0, "unverified", "fairlead io calibrate "+disk.Path)
	mustSay(t, a.run("io", "capacity", disk.Path, "riops=1000", "wiops=1000"), 0, "1.00kr 1.00kw", "given by an operator")
	a.stands("e2e-db", "blockio", api.StateDone)
	a.stands("e2e-web", "blockio", api.StateDone)
	_, err = a.api.DeleteReservation(t.Context(), first.ID)
	must(t, err)

	_, err = reserve(api.BlockIOFigures{ReadIOPS: 801})
	testkit.Fails(t, "more than is left", err, "80.0% of its capacity left (800 read or 800 write operations per second), and 80.1% are asked for", `"e2e-web"`, "holds 10.0%")
	own, err := reserve(api.BlockIOFigures{ReadIOPS: 700})
	must(t, err)
	_, err = a.api.ChangeReservation(t.Context(), own.ID, api.BlockIOFigures{ReadIOPS: 801})
	testkit.Fails(t, "a change to more", err, "80.1% are asked for")
	_, err = a.api.ChangeReservation(t.Context(), own.ID, api.BlockIOFigures{ReadIOPS: 700, WriteIOPS: 100})
	must(t, err)

	a.kill()
	a.start()
	a.stands("e2e-db", "blockio", api.StateDone)
	a.stands("e2e-web", "blockio", api.StateDone)
	mustSay(t, a.run("reserve"), 0, "e2e-db", "700r 100w", "80.0 %")
	mustSay(t, a.run("io"), 0, "e2e-db", "700r 100w", "idle")
	mustSay(t, a.run("io", "--devices"), 0, "90 %", "10 %")
	mustSay(t, a.run("io", "events"), 0, "Nothing has happened.")
	_, err = a.api.DeleteReservation(t.Context(), own.ID)
	must(t, err)
	_, err = reserve(api.BlockIOFigures{ReadIOPS: 800})
	must(t, err)

	// A reservation ends with its container.
	must(t, db.Destroy())
	await(t, "the reservation ends with its container", func() error {
		list, err := a.api.Reservations(t.Context())
		if err == nil && len(list.Reservations) != 1 {
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
	mustSay(t, a.run("reserve"), 0, "lost")
	mustSay(t, a.run("io"), 0, "lost", "is not the disk any more")
	a.stop()
}

// TestCalibrateRealtime measures a profile of real-time budgets on the machine's disk, and derives
// a container's budget from it. The measurement leaves nothing behind.
func TestCalibrateRealtime(t *testing.T) {
	testkit.Later(t)
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
	mustSay(t, run(t, calibrate, (*exec.Cmd).Start), 0, "measured", "real-time for 20ms", "real-time for 400ms")
	left, err := os.ReadDir(dir)
	must(t, err)
	testkit.None(t, "files that the measurement left", left) // processes are testkit.Main's to find
	a.stands("e2e-db", "blockio", api.StateDone)
	mustSay(t, a.run("reserve", "e2e-db", path, "riops=10"), 0)
	mustSay(t, a.run("set", "e2e-db", "io.realtime=auto", "io.help=realtime"), 0)
	mustSay(t, a.run("io"), 0, "e2e-db: real-time for")
	a.stop()
}
