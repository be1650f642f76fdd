package blockio

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// A disk behind the network, of the kernel's own NVMe target: how it is reached is told, and
// one that has several paths is refused with what would mend that.
func TestRemoteDisk(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t)
	const fabrics, address, port = "/dev/nvme-fabrics", "127.0.0.1", "4420"
	if _, err := os.Stat("/sys/module/nvmet_tcp"); err != nil {
		testkit.Skip(t, "the kernel has no NVMe over TCP")
	}
	config := t.TempDir()
	must(t, unix.Mount("none", config, "configfs", 0, ""))
	t.Cleanup(func() { must(t, unix.Unmount(config, 0)) })
	write := func(path, text string) {
		t.Helper()
		must(t, os.WriteFile(path, []byte(text), 0))
	}
	const nqn = "nqn.2014-08.org.fairlead:test"
	subsystem, at := filepath.Join(config, "nvmet/subsystems", nqn), filepath.Join(config, "nvmet/ports/1")
	namespace, link := filepath.Join(subsystem, "namespaces/1"), filepath.Join(at, "subsystems", nqn)
	for _, dir := range []string{subsystem, namespace, at} {
		must(t, os.Mkdir(dir, 0o755))
		t.Cleanup(func() { must(t, os.Remove(dir)) })
	}
	write(filepath.Join(subsystem, "attr_allow_any_host"), "1")
	write(filepath.Join(namespace, "device_path"), h.disk(1000).Path)
	write(filepath.Join(namespace, "enable"), "1")
	t.Cleanup(func() { write(filepath.Join(namespace, "enable"), "0") })
	for name, value := range map[string]string{"trtype": "tcp", "adrfam": "ipv4", "traddr": address, "trsvcid": port} {
		write(filepath.Join(at, "addr_"+name), value)
	}
	must(t, os.Symlink(subsystem, link))
	t.Cleanup(func() { must(t, os.Remove(link)) })

	f, err := os.OpenFile(fabrics, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	_, err = fmt.Fprintf(f, "transport=tcp,traddr=%s,trsvcid=%s,nqn=%s,nr_io_queues=1", address, port, nqn)
	must(t, err)
	answer := make([]byte, 64)
	n, err := f.Read(answer)
	must(t, err)
	instance, _, _ := strings.Cut(strings.TrimPrefix(string(answer[:n]), "instance="), ",")
	controller := filepath.Join("/sys/class/nvme/nvme" + instance)
	t.Cleanup(func() { write(filepath.Join(controller, "delete_controller"), "1") })

	disk := ""
	for end := time.Now().Add(30 * time.Second); disk == "" && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		found, _ := filepath.Glob("/sys/block/nvme*n1")
		for _, d := range found {
			if r, ok := block.FindRemote("/sys", filepath.Base(d)); ok && len(r.Paths) > 0 {
				disk = filepath.Base(d)
			}
		}
	}
	r, _ := block.FindRemote("/sys", disk)
	if r.Transport != "NVMe/TCP" || len(r.Paths) != 1 || r.Paths[0].To != netip.MustParseAddr(address) {
		t.Fatalf("disk %q is reached by %+v", disk, r)
	}
	h.net, err = netdev.Open("/proc/self/ns/net")
	must(t, err)
	if got, err := h.carriers(disk); err != nil || fmt.Sprint(got) != "[lo]" {
		t.Errorf("%s over %v, %v", disk, got, err)
	}
	c, _ := h.container("c")
	err = h.Apply(t.Context(), target(t, c, "io.reserve: /dev/"+disk+" riops=1", "io.interrupts: apart"))
	t.Log(err)
	if !errors.Is(err, block.ErrNoRequests) || !strings.Contains(err.Error(), "nvme_core.multipath=N") {
		t.Errorf("%v", err)
	}
}
