package kernel

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

func TestOpener(t *testing.T) {
	r := Default()
	r.Cgroup = t.TempDir()
	file := filepath.Join(r.Cgroup, "cpu.rt_period_us")
	testkit.Must(t, os.WriteFile(file, []byte("1024\n"), 0o644))
	k, err := Opener(r)(journal.Ref{Kind: "file", Object: file})
	testkit.Must(t, err)
	testkit.Gives(t, "Read", "1024")(k.Read())
	for _, c := range []struct{ kind, object, says string }{
		{"file", "/etc/passwd", "below"},
		{"kthread", "1:1:/sys/fs/cgroup", "no cgroup hierarchy"}, // the root is a temporary directory
		{"", "x", "unknown kind"},
		{"nonsense", "x", "unknown kind"},
		{"offload", "x", "offload"},
	} {
		if k, err := Opener(r)(journal.Ref{Kind: c.kind, Object: c.object}); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s %q: %v, %v", c.kind, c.object, k, err)
		}
	}
	if _, err := Opener(Default())(journal.Ref{Kind: "affinity", Object: "1:1"}); !errors.Is(err, journal.ErrGone) {
		t.Errorf("a thread that started at another time: %v", err)
	}
}
