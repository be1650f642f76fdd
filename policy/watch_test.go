package policy

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestWatchWriter: a file that is open for writing is not read until it is closed, even if it is valid.
// One that stays open is read after a while.
func TestWatchWriter(t *testing.T) {
	for _, c := range []struct {
		name  string
		burst time.Duration
		first string // the part that is written first
		close bool
	}{
		{"closed", time.Hour, all("netcpu: isolate") + "---\n", true},
		{"nothing yet", time.Hour, "", true},
		{"never closed", 2 * time.Second, all("netcpu: isolate") + "---\n", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir+"/a.yaml", all("netcpu: auto")+"---\n"+all("net.weight: 2"))
			write(t, dir+"/empty.yaml", "") // complete: not a beginning of another
			s := NewStore(dir, time.Now)
			s.poll, s.burst = time.Hour, c.burst
			type state struct {
				mode     NetCPU
				policies int
			}
			calls := make(chan state, 100)
			stop := testkit.Background(t, func(ctx context.Context) error {
				return s.Watch(ctx, func() { calls <- state{netcpuOf(s), s.Status().Policies} })
			})
			defer stop()
			await := func(want state) {
				t.Helper()
				select {
				case got := <-calls:
					if got != want {
						t.Fatalf("news of %+v, want %+v", got, want)
					}
				case <-time.After(90 * time.Second):
					t.Fatalf("no news of %+v; status %+v", want, s.Status())
				}
			}
			await(state{NetCPUAuto, 2})
			f, err := os.OpenFile(dir+"/a.yaml", os.O_WRONLY|os.O_TRUNC, 0)
			testkit.Must(t, err)
			defer f.Close()
			_, err = f.WriteString(c.first)
			testkit.Must(t, err)
			if !c.close {
				await(state{NetCPUIsolate, 1})
				return
			}
			time.Sleep(10 * quiet)
			rest := all("netcpu: isolate") + "---\n" + all("net.weight: 3")
			_, err = f.WriteString(rest[len(c.first):])
			testkit.Must(t, err)
			time.Sleep(3 * quiet) // and it has no event when it is closed
			if len(calls) > 0 {
				t.Errorf("news of %+v while it is open", <-calls)
			}
			testkit.Must(t, f.Close())
			await(state{NetCPUIsolate, 2})
			time.Sleep(3 * quiet)
			if len(calls) > 0 {
				t.Errorf("more news: %+v", <-calls)
			}
		})
	}
}

// TestWatchNoLease: if the kernel does not report writers, a written file is read all the same.
func TestWatchNoLease(t *testing.T) {
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	// A file of another user's, without CAP_LEASE.
	if os.Geteuid() == 0 {
		write(t, a, all("netcpu: auto"))
		testkit.Must(t, os.Chown(a, 1, 1))
	} else {
		testkit.Must(t, os.Symlink("/etc/passwd", a))
	}
	s := NewStore(dir, time.Now)
	s.poll = time.Hour
	calls, found := make(chan NetCPU, 100), make(chan writer, 1)
	stop := testkit.Background(t, func(ctx context.Context) error {
		runtime.LockOSThread() // and never unlocked: the thread ends with this
		testkit.Check(t, withoutLease())
		_, w, _ := readFile(a)
		found <- w
		return s.Watch(ctx, func() { calls <- netcpuOf(s) })
	})
	defer stop()
	if w := <-found; w != unknownWriter {
		t.Fatalf("writer %d of a file without leases", w)
	}
	<-calls
	if os.Geteuid() != 0 {
		return // the rest needs a foreign file to write to
	}
	write(t, a, all("netcpu: isolate"))
	for deadline, got := time.After(90*time.Second), NetCPU(""); got != NetCPUIsolate; {
		select {
		case got = <-calls: // of the empty file, too, where writing takes long
		case <-deadline:
			t.Fatalf("not noticed; status %+v", s.Status())
		}
	}
}

// withoutLease takes CAP_LEASE from the thread.
func withoutLease() error {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&h, &sets[0]); err != nil {
		return err
	}
	sets[0].Effective &^= 1 << unix.CAP_LEASE
	return unix.Capset(&h, &sets[0])
}
