package probe

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/kernel"
)

func TestMarks(t *testing.T) {
	proc, etc := t.TempDir(), t.TempDir()
	for pid, comm := range map[string]string{"7": "kubelet", "8": "sh", "9": "tailscaled"} {
		write(t, filepath.Join(proc, pid, "comm"), comm+"\n")
	}
	write(t, filepath.Join(proc, "self", "comm"), "weaver\n") // no process
	write(t, filepath.Join(etc, "cni/net.d", "10-calico.conflist"), `{"plugins":[{"type":"calico"},{"type":"portmap"}]}`)
	for _, tt := range []struct {
		mask  uint32
		level Level
		says  []string
	}{
		{0, Full, []string{"no bits"}},
		{0x00001fff, Full, []string{"0x1fff"}}, // Cilium would be, but is not here
		{0x0000ffff, Degraded, []string{"Kubernetes, 0xc000 (kubelet pid 7)", "portmap, 0x2000 (10-calico.conflist)"}},
		{0xffff0000, Degraded, []string{"Calico, 0xffff0000 (10-calico.conflist)", "Tailscale, 0xc0000 (tailscaled pid 9)"}},
	} {
		a := marks(Config{Roots: kernel.Roots{Proc: proc}, Etc: etc, Mark: tt.mask})
		if a.Level != tt.level {
			t.Errorf("%#x: %+v", tt.mask, a)
		}
		for _, s := range tt.says {
			if !strings.Contains(a.detail, s) {
				t.Errorf("%#x: %q, want %q", tt.mask, a.detail, s)
			}
		}
		if strings.Contains(a.detail, "Weave") || tt.mask == 0xffff0000 && strings.Contains(a.detail, "Kubernetes") {
			t.Errorf("%#x: %q", tt.mask, a.detail)
		}
	}
}
