package block

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestFindRemote(t *testing.T) {
	const (
		session = "devices/platform/host2/session1"
		ctl     = "devices/virtual/nvme-fabrics/ctl"
		several = "devices/virtual/nvme-subsystem/nvme-subsys1"
	)
	sys := testkit.Tree(t, map[string]string{
		"block/vda": "->devices/pci0/virtio1/block/vda", "devices/pci0/virtio1/block/vda/dev": "254:0",
		"block/sda": "->" + session + "/target2:0:0/2:0:0:0/block/sda", session + "/target2:0:0/2:0:0:0/block/sda/dev": "8:0",
		session + "/connection1:0/iscsi_connection/connection1:0/address": "192.0.2.1\n",
		"block/sdb": "->devices/pci0/host0/target0:0:0/0:0:0:0/block/sdb", "devices/pci0/host0/target0:0:0/0:0:0:0/block/sdb/dev": "8:16",
		"block/nvme0n1": "->devices/pci0/nvme/nvme0/nvme0n1", "devices/pci0/nvme/nvme0/nvme0n1/dev": "259:0",
		"devices/pci0/nvme/nvme0/transport": "pcie\n", "devices/pci0/nvme/nvme0/address": "0000:00:04.0\n",
		"block/nvme1n1": "->" + ctl + "/nvme1/nvme1n1", ctl + "/nvme1/nvme1n1/dev": "259:1",
		ctl + "/nvme1/transport": "tcp\n", ctl + "/nvme1/address": "traddr=2001:db8::1,trsvcid=4420,host_iface=eth1,src_addr=2001:db8::2\n",
		"block/nvme2n1": "->" + several + "/nvme2n1", several + "/nvme2n1/dev": "259:2",
		several + "/nvme2": "->" + ctl + "/nvme2", ctl + "/nvme2/transport": "tcp\n", ctl + "/nvme2/address": "traddr=192.0.2.7,trsvcid=4420\n",
		several + "/nvme3": "->" + ctl + "/nvme3", ctl + "/nvme3/transport": "rdma\n", ctl + "/nvme3/address": "\n",
		"block/nbd0": "->devices/virtual/block/nbd0", "devices/virtual/block/nbd0/pid": "77\n",
		"block/nbd1": "->devices/virtual/block/nbd1", "devices/virtual/block/nbd1/dev": "43:1\n",
	})
	addr := netip.MustParseAddr
	for disk, want := range map[string]Remote{
		"vda": {}, "sdb": {}, "nvme0n1": {}, "nbd1": {Transport: "NBD"}, "none": {},
		"sda":     {"iSCSI", []Path{{To: addr("192.0.2.1")}}},
		"nvme1n1": {"NVMe/TCP", []Path{{addr("2001:db8::1"), addr("2001:db8::2"), "eth1"}}},
		"nvme2n1": {"NVMe/RDMA", []Path{{To: addr("192.0.2.7")}}},
		"nbd0":    {Transport: "NBD"},
	} {
		got, ok := FindRemote(sys, disk)
		if !reflect.DeepEqual(got, want) || ok != (disk == "sda" || disk == "nbd0" || disk == "nvme1n1" || disk == "nvme2n1") {
			t.Errorf("%s: %+v, %v, want %+v", disk, got, ok, want)
		}
	}
}

func FuzzFabric(f *testing.F) {
	f.Add("traddr=192.0.2.1,trsvcid=4420,host_iface=eth1")
	f.Add("traddr=,=,,src_addr=::1%x")
	f.Fuzz(func(t *testing.T, address string) {
		if p := fabric(address); p.To.IsValid() && p.To.String() == "" {
			t.Error(p)
		}
	})
}
