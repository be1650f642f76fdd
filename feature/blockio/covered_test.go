package blockio

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/mountinfo"
)

// On cgroup v1 buffered writes pass a cap, and so does whatever is in a cgroup below that
// of the container: that is no cap that holds. Reads of the container's own are capped.
func TestThrottleCovered(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000)
	c, cg := h.container("batch")
	v1 := cg.IO != cg.V2
	for _, x := range []struct {
		caps, says string // on cgroup v1
	}{
		{"riops=70 rbps=1mb", ""},
		{"wbps=5mb", "buffered writes pass at " + l.Path},
		{"wiops=5", "buffered writes pass at " + l.Path},
	} {
		mustSayPartly(t, h.Apply(t.Context(), target(t, c, "io.max: "+l.Path+" "+x.caps)), v1 && x.says != "", x.says)
	}
	below := cg.Child(t, "below")
	below.Sleeper(t)
	mustSayPartly(t, h.Apply(t.Context(), target(t, c, "io.max: "+l.Path+" riops=5")), v1, `cgroups below the container's ("below") pass`)
	mustSayPartly(t, h.Apply(t.Context(), target(t, c, "netcpu: observe")), false, "")
}

// mustSayPartly fails unless an error says, or does not say, that a part is not covered.
func mustSayPartly(t *testing.T, err error, partly bool, text string) {
	t.Helper()
	if errors.Is(err, feature.ErrPartly) != partly || !partly && err != nil || partly && !strings.Contains(err.Error(), text) {
		t.Errorf("%v, want partly %t: %s", err, partly, text)
	}
}

// On cgroup v2 it depends on the file systems that the container sees of the disk.
func TestWritebackCovered(t *testing.T) {
	for _, x := range []struct {
		mounts []string // type, options
		want   string
	}{
		{[]string{"ext4 rw,errors=remount-ro", "xfs rw", "btrfs rw", "vfat ro"}, ""},
		{[]string{"xfs rw", "vfat rw,fmask=0022"}, "/1 (vfat)"},
		{[]string{"ext4 rw,data=journal", "ntfs3 rw"}, "/0 (ext4) /1 (ntfs3)"},
	} {
		var got []string
		for i, m := range x.mounts {
			typ, super, _ := strings.Cut(m, " ")
			if mount := (mountinfo.Mount{Dir: fmt.Sprintf("/%d", i), Type: typ, Super: super}); !writeback(mount) {
				got = append(got, fmt.Sprintf("%s (%s)", mount.Dir, mount.Type))
			}
		}
		if strings.Join(got, " ") != x.want {
			t.Errorf("%q: %q, want %q", x.mounts, got, x.want)
		}
	}
}

// All that does not hold is said, and not the first alone.
func TestCoverSaysAll(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000)
	c, cg := h.container("batch")
	if cg.IO == cg.V2 {
		return // TestThrottleCovered says it of the other kind of host
	}
	err := h.Apply(t.Context(), target(t, c, "io.max: "+l.Path+" wiops=5", "io.weight: 50"))
	mustSayPartly(t, err, true, "io.weight 50")
	mustSayPartly(t, err, true, "io.max: buffered writes")
}
