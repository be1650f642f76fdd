package node

import (
	"fmt"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// doctor fails where nothing works, and where it cannot find out.
func TestUseless(t *testing.T) {
	finding := func(name, area string, level api.Level) api.Finding {
		return api.Finding{Capability: name, Area: area, Verdict: api.Verdict{Level: level, Why: "no"}}
	}
	root, v2, works := finding("root", "host", api.LevelFull), finding("cgroup-v2", "cgroup", api.LevelFull), finding("netcpu", api.AreaFeatures, api.LevelDegraded)
	for _, tt := range []struct {
		r    api.Report
		want string
	}{
		{api.Report{root, v2, works, finding("traffic", api.AreaFeatures, api.LevelUnavailable)}, ""},
		{api.Report{root, v2, finding("traffic", api.AreaFeatures, api.LevelUnavailable)}, "no feature works here"},
		{api.Report{finding("root", "host", api.LevelUnavailable), v2, works}, "not run as root"},
		{api.Report{root, finding("cgroup-v2", "cgroup", api.LevelUnavailable), works}, "cannot work on this host"},
	} {
		testkit.Says(t, fmt.Sprintf("%+v", tt.r), useless(tt.r), tt.want)
	}
}
