package agent

import (
	"math"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// The functions below convert the inner types to the API's, which change more slowly.

func wireContainer(c container.Container) api.Container {
	w := api.Container{
		ID: api.ID(c.ID), Name: c.Name, Source: c.Source, RuntimeID: c.RuntimeID, Image: c.Image, ImageNames: c.ImageNames, Labels: c.Labels,
		Pod: c.Pod, Namespace: c.Namespace, PID: c.PID, Started: c.Started,
		Cgroup: api.Cgroup(c.Cgroup), NetNS: c.NetNS, HostNetwork: c.HostNetwork,
		Interfaces: make([]api.Interface, 0, len(c.Interfaces)),
		Many:       c.Many,
		Policy:     []api.Setting{},
		Features:   []api.FeatureStatus{},
	}
	for _, i := range c.Interfaces {
		wi := api.Interface{Name: i.Name, Index: i.Index, Kind: i.Kind, MAC: i.MAC, Addrs: i.Addrs}
		if i.Host.Index != 0 {
			wi.Host = &api.HostEnd{NetNS: i.Host.NetNS, Name: i.Host.Name, Index: i.Host.Index, Master: i.Host.Master}
		}
		w.Interfaces = append(w.Interfaces, wi)
	}
	return w
}

func wireSettings(origins []policy.Origin) []api.Setting {
	out := make([]api.Setting, 0, len(origins))
	for _, o := range origins {
		out = append(out, api.Setting(o))
	}
	return out
}

func wireVerdict(v probe.Verdict) api.Verdict {
	return api.Verdict{Level: api.Level(v.Level), Why: v.Why, Mend: v.Mend}
}

func wireReport(r probe.Report) api.Report {
	out := make(api.Report, 0, len(r))
	for _, f := range r {
		out = append(out, api.Finding{Capability: f.Capability, Area: f.Area, Verdict: wireVerdict(f.Verdict), Detail: f.Detail})
	}
	return out
}

func wireProblems(problems []policy.Problem, match func(policy.Problem) bool) []api.Problem {
	var out []api.Problem
	for _, p := range problems {
		if match(p) {
			out = append(out, api.Problem{Container: api.ID(p.Container), Text: p.String()})
		}
	}
	return out
}

func wireLabels(labels []feature.Label) []api.Label {
	var out []api.Label
	for _, l := range labels {
		out = append(out, api.Label{Name: l.Name, Value: l.Value, Container: api.ID(l.Container)})
	}
	return out
}

func wireSamples(name string, s feature.Snapshot) api.FeatureSamples {
	out := api.FeatureSamples{Feature: name, Taken: s.Taken, Samples: make([]api.Sample, 0, len(s.Samples))}
	for _, x := range s.Samples {
		if x.Histogram != nil {
			continue // for the metrics page; the API has quantiles in their place
		}
		// JSON cannot represent these, and one must not spoil the rest.
		if !math.IsNaN(x.Value) && !math.IsInf(x.Value, 0) {
			out.Samples = append(out.Samples, api.Sample{Container: api.ID(x.Container), Name: x.Name, Device: x.Device, Labels: wireLabels(x.Labels), Value: x.Value})
		}
	}
	return out
}
