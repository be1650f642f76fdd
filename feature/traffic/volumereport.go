package traffic

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic/volume"
	"github.com/fairlead-project/fairlead/policy"
)

// report answers an api.VolumesAsk, with counters of this moment.
func (v *volumes) report(ask api.VolumesAsk) (any, error) {
	if v == nil {
		return nil, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: "this agent counts no volumes: its flag --volumes names no file"}
	}
	v.count()
	v.mu.Lock()
	defer v.mu.Unlock()
	out := api.Volumes{Taken: v.now(), Zone: v.ledger.Zone(), Accounts: []api.Volume{}}
	names := v.ledger.Accounts()
	if ask.Of != "" {
		var err error
		if names, err = v.named(ask.Of, names); err != nil {
			return nil, err
		}
	}
	running := v.running()
	for _, name := range names {
		a, _ := v.ledger.Account(name)
		day, month := v.ledger.Names()
		row := api.Volume{
			Account: name, First: a.First, Last: a.Last,
			Total: wireBytes(a.Total), Day: wireBytes(a.Days[day]), Month: wireBytes(a.Months[month]),
		}
		for _, id := range running[name] {
			if row.Container == 0 {
				row.Container = api.ID(id)
			}
			if of := v.limits[id]; of.Bytes > 0 {
				row.Limits = append(row.Limits, api.VolumeLimit{
					Container: api.ID(id), Volume: of.String(), Bytes: of.Bytes, After: of.After,
					Used: v.ledger.Used(name, of.Per).Of(of.Of), Until: v.ledger.End(of.Per),
				})
			}
		}
		if ask.Of != "" {
			row.Days, row.Months = periods(a.Days), periods(a.Months)
		}
		out.Accounts = append(out.Accounts, row)
	}
	return out, nil
}

// running lists the containers of each account, sorted. v.mu is held.
func (v *volumes) running() map[string][]container.ID {
	of := make(map[string][]container.ID)
	for _, id := range slices.Sorted(maps.Keys(v.accounts)) {
		of[v.accounts[id]] = append(of[v.accounts[id]], id)
	}
	return of
}

// named finds an account by its name, or by what follows the runtime there, or by a container that
// runs.
func (v *volumes) named(of string, names []string) ([]string, error) {
	if slices.Contains(names, of) {
		return []string{of}, nil
	}
	found := make(map[string]bool)
	for _, name := range names {
		if _, own, _ := strings.Cut(name, "/"); own == of {
			found[name] = true
		}
	}
	for id, name := range v.accounts {
		c, _ := v.containers.Lookup(id)
		if _, known := v.ledger.Account(name); known && (c.Name == of || id.String() == of || len(of) >= 12 && strings.HasPrefix(c.RuntimeID, of)) {
			found[name] = true
		}
	}
	list := slices.Sorted(maps.Keys(found))
	switch len(list) {
	case 0:
		return nil, &api.Error{Status: http.StatusNotFound, Code: "not_found", Text: "there is no account, and no running container with one, of that name"}
	case 1:
		return list, nil
	}
	return nil, &api.Error{Status: http.StatusConflict, Code: "ambiguous", Text: fmt.Sprintf("that may be any of the accounts %q", list)}
}

func periods(rows map[string]volume.Amount) (list []api.VolumePeriod) {
	for _, key := range slices.Backward(slices.Sorted(maps.Keys(rows))) {
		list = append(list, api.VolumePeriod{Period: key, VolumeBytes: wireBytes(rows[key])})
	}
	return list
}

func wireBytes(a volume.Amount) api.VolumeBytes {
	return api.VolumeBytes{Sent: a.Sent, Received: a.Received}
}

// samples adds what is known of the accounts of running containers, each for its container with the
// lowest id.
func (v *volumes) samples(to []feature.Sample) []feature.Sample {
	if v == nil {
		return to
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for name, ids := range v.running() {
		a, _ := v.ledger.Account(name)
		for way, n := range map[Direction]uint64{Egress: a.Total.Sent, Ingress: a.Total.Received} {
			to = append(to, feature.Sample{Container: ids[0], Name: "traffic_volume_bytes_total", Labels: []feature.Label{{Name: "direction", Value: string(way)}}, Value: float64(n)})
		}
		for _, id := range ids {
			if of := v.limits[id]; of.Bytes > 0 {
				label := []feature.Label{{Name: "per", Value: string(of.Per)}}
				to = append(to,
					feature.Sample{Container: id, Name: "traffic_volume_limit_bytes", Labels: label, Value: float64(of.Bytes)},
					feature.Sample{Container: id, Name: "traffic_volume_used_bytes", Labels: label, Value: float64(v.ledger.Used(name, of.Per).Of(of.Of))})
			}
		}
	}
	return to
}

// follow remembers the volumes of policy. v.mu is held.
func (v *volumes) follow(targets []policy.Target) {
	clear(v.limits)
	for _, t := range targets {
		if t.Settings.Volume.Bytes > 0 {
			v.limits[t.Container.ID] = t.Settings.Volume
		}
	}
}
