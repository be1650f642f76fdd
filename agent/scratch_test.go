package agent

import (
	"slices"
	"strings"
	"testing"
)

// A disk is calibrated by itself only if the operator says so, and names a directory on it.
func TestScratch(t *testing.T) {
	for _, x := range []struct {
		calibrate, scratch string
		dirs               []string
		says               string
	}{
		{"", "", nil, ""},
		{"off", "/srv", nil, ""},
		{"idle", "/srv", []string{"/srv"}, ""},
		{"idle", " /srv/ , /data,", []string{"/srv", "/data"}, ""},
		{"idle", "", nil, "needs io.scratch"},
		{"idle", " , ", nil, "needs io.scratch"},
		{"idle", "srv", nil, `"srv" is not an absolute path`},
		{"always", "/srv", nil, "neither off nor idle"},
	} {
		dirs, err := FeatureConfig{DiskCalibrate: x.calibrate, DiskScratch: x.scratch}.scratch()
		if !slices.Equal(dirs, x.dirs) || (err == nil) != (x.says == "") || err != nil && !strings.Contains(err.Error(), x.says) {
			t.Errorf("%q in %q: %q, %v, want %q and %q", x.calibrate, x.scratch, dirs, err, x.dirs, x.says)
		}
	}
}
