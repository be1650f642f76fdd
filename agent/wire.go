package agent

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"regexp"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/netdev"
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

func wireSamples(name string, s feature.Snapshot) api.FeatureSamples {
	out := api.FeatureSamples{Feature: name, Taken: s.Taken, Samples: make([]api.Sample, 0, len(s.Samples))}
	for _, x := range s.Samples {
		if x.Histogram != nil {
			continue // for the metrics page; the API has quantiles in their place
		}
		// JSON has no NaN or infinity, and one such value must not spoil the rest.
		if math.IsNaN(x.Value) || math.IsInf(x.Value, 0) {
			continue
		}
		w := api.Sample{Container: api.ID(x.Container), Name: x.Name, Device: x.Device, Value: x.Value}
		for _, l := range x.Labels {
			w.Labels = append(w.Labels, api.Label{Name: l.Name, Value: l.Value, Container: api.ID(l.Container)})
		}
		out.Samples = append(out.Samples, w)
	}
	return out
}

// device identifies a network device as the kernel and the journal do.
type device struct {
	netns uint64 // inode of its namespace
	index int
}

// Devices maps network devices to their names, for texts that people read.
type Devices map[device]string

// HostDevices names the devices of the namespace of this process. Devices that cannot be listed
// have no name.
func HostDevices(roots kernel.Roots) Devices {
	names := make(Devices)
	ns, err := netdev.Open(filepath.Join(roots.Proc, "self/ns/net"))
	if err != nil {
		return names
	}
	defer ns.Close()
	links, err := ns.Links(netdev.MostLinks)
	if err != nil {
		return names
	}
	for _, l := range links {
		names[device{ns.Inode(), l.Index}] = l.Name
	}
	return names
}

// devices names the devices of the host and of running containers.
func (a *Agent) devices() Devices {
	names := HostDevices(a.cfg.Roots)
	for _, c := range a.set.Snapshot().Containers {
		for _, i := range c.Interfaces {
			if c.NetNS != 0 {
				names[device{c.NetNS, i.Index}] = i.Name + " of " + c.Name
			}
			if i.Host.Index != 0 {
				names[device{i.Host.NetNS, i.Host.Index}] = i.Host.Name
			}
		}
	}
	return names
}

// of returns the name of the device of a journal object (NETNS/INDEX, perhaps with more); "" if the
// object has no device, or its name is unknown.
func (d Devices) of(object string) string {
	var at device
	if n, _ := fmt.Sscanf(object, "%d/%d", &at.netns, &at.index); n < 2 {
		return ""
	}
	return d[at]
}

// numbered matches a device in the errors of packages netdev and qdisc.
var numbered = regexp.MustCompile(`device ([0-9]+) (?:in|of) netns ([0-9]+)`)

// named inserts the names of devices into the text of an error. It calls find only if the text has
// such a device.
func named(text string, find func() Devices) string {
	return numbered.ReplaceAllStringFunc(text, func(s string) string {
		m := numbered.FindStringSubmatch(s)
		if name := find().of(m[2] + "/" + m[1]); name != "" {
			return name
		}
		return s
	})
}

// status is the state of the worker's feature for one container.
func (w *worker) status(id container.ID) api.FeatureStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := api.FeatureStatus{Feature: w.feature.Name(), State: api.StatePending}
	r := w.rows[id]
	if r == nil {
		return s
	}
	s.Since, s.Tries = r.since, r.tries
	switch {
	case errors.Is(r.err, feature.ErrPartly):
		s.State, s.Error = api.StatePartly, api.Text(r.err)
	case r.err != nil:
		s.State, s.Error, s.Next = api.StateError, api.Text(r.err), r.due
	case r.settled:
		s.State = api.StateDone
	}
	if what := w.hang(); what != "" && w.busy == r {
		s.State, s.Error = api.StateError, what
	} else if what != "" && s.State == api.StatePending {
		s.Error = "it waits: " + what
	}
	return s
}

// withRefused adds to the result of an Apply the labels that policy refuses for keys of the
// feature. Without them a Target is in force only in part.
func withRefused(name string, t policy.Target, err error) error {
	for _, p := range t.Refused {
		if policy.FeatureOf(p.Key) == name {
			err = partly(err, p.Key+": "+p.Reason)
		}
	}
	return err
}

// partly adds to the result of an Apply a part that is not in force. Other errors stay.
func partly(err error, what string) error {
	switch {
	case err == nil:
		return fmt.Errorf("%w: %s", feature.ErrPartly, what)
	case errors.Is(err, feature.ErrPartly):
		return fmt.Errorf("%w; %s", err, what)
	}
	return err
}

// totals counts the containers by state.
func (w *worker) totals() api.Feature {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := api.Feature{Name: w.feature.Name(), Support: wireVerdict(w.fence.verdict(w.feature)), Prune: api.Text(w.prune.err)}
	for _, r := range w.rows {
		switch {
		case r.err != nil && !r.settled, w.busy == r && w.hang() != "":
			t.Failed++
		case errors.Is(r.err, feature.ErrPartly):
			t.Partly++
		case r.settled:
			t.Done++
		default:
			t.Pending++
		}
	}
	return t
}

// statuses returns the state of every feature for one container.
func (a *Agent) statuses(t policy.Target) []api.FeatureStatus {
	id := t.Container.ID
	a.mu.Lock()
	held, keeper := a.heldAll || a.held[id], a.kept[id]
	a.mu.Unlock()
	out := []api.FeatureStatus{}
	for _, f := range a.all {
		w := a.worker(f.Name())
		switch v := a.fence(f).verdict(f); {
		case w == nil || v.Level == probe.Unavailable:
			out = append(out, api.FeatureStatus{Feature: f.Name(), State: api.StateUnavailable, Error: v.Why})
		case held && !w.has(id):
			out = append(out, api.FeatureStatus{Feature: f.Name(), State: api.StateHeld})
		case keeper != "" && !w.has(id):
			out = append(out, api.FeatureStatus{Feature: f.Name(), State: api.StateKept, Error: keeper + ", which knows the container, does not answer"})
		default:
			out = append(out, w.status(id))
		}
	}
	return out
}

// featureTotals returns the state of each feature on this host.
func (a *Agent) featureTotals() []api.Feature {
	out := []api.Feature{}
	for _, f := range a.all {
		if w := a.worker(f.Name()); w != nil {
			out = append(out, w.totals())
		} else {
			out = append(out, api.Feature{Name: f.Name(), Support: wireVerdict(a.fence(f).verdict(f))})
		}
	}
	return out
}
