package policy

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/container"
)

// Override is one value that somebody has given to one running container by
// hand. It stands above files and labels, whether or not labels are denied.
type Override struct {
	Container container.ID `json:"container,string"`
	Key       string       `json:"key"`   // as in a file: "net.rate"
	Value     string       `json:"value"` // as in a label
	From      string       `json:"from"`  // the place that explain names: "set by uid 0 at ..."
}

// overridesOf makes layers of overrides, by container. What is no valid value
// is left out and told.
func overridesOf(all []Override) (map[container.ID]layer, []Problem) {
	layers := map[container.ID]layer{}
	var problems []Problem
	for _, o := range all {
		k, known := lookup(o.Key)
		if !known {
			problems = append(problems, Problem{Container: o.Container, Key: o.Key, Value: o.Value, Reason: unknownKey(o.Key, names("", ""))})
			continue
		}
		set, err := k.parseValue(o.Value)
		if err != nil {
			problems = append(problems, Problem{Container: o.Container, Key: o.Key, Value: o.Value, Reason: err.Error()})
			continue
		}
		if layers[o.Container] == nil {
			layers[o.Container] = layer{}
		}
		layers[o.Container][o.Key] = entry{set: set, hand: true, origin: Origin{Key: prefix + o.Key, Value: o.Value, From: o.From}}
	}
	return layers, problems
}

// KnownKey gives the name of a key without the prefix that it has in a label,
// with a Problem if there is no such key.
func KnownKey(name string) (string, error) {
	key := strings.TrimPrefix(name, prefix)
	if _, ok := lookup(key); !ok {
		return "", Problem{Key: name, Reason: unknownKey(key, names("", ""))}
	}
	return key, nil
}

// Override makes all the values that are set by hand, in place of those before.
// Those that are no valid values are left out; the error is then a [Problems].
func (s *Store) Override(all []Override) error {
	layers, problems := overridesOf(all)
	s.mu.Lock()
	defer s.mu.Unlock()
	// What was taken back must not stand in for anything any more.
	for id, last := range s.last {
		now := layers[id]
		maps.DeleteFunc(last, func(key string, e entry) bool { return e.hand && now[key].origin != e.origin })
	}
	s.overrides = layers
	if len(problems) > 0 {
		return Problems(problems)
	}
	return nil
}

// Check says why overrides cannot be those of c, all that there are of it; nil
// if they can. It changes nothing. The error is a [Problems]: of values that are
// no values, or that contradict each other or what files and labels say, or
// that this build has nothing for.
func (s *Store) Check(c container.Container, overrides []Override) error {
	layers, problems := overridesOf(overrides)
	for i := range problems {
		problems[i].Container = 0 // who asks knows whom about
	}
	mine := layers[c.ID]
	for _, key := range slices.Sorted(maps.Keys(mine)) {
		if o := mine[key].origin; unbuilt(o) {
			problems = append(problems, Problem{Key: key, Value: o.Value, Reason: NotAvailable})
		}
	}
	if len(problems) == 0 {
		files := s.Policy()
		c = s.own(c)
		held := files.matching(c)
		_, before, _ := files.resolve(c, held, nil, nil)
		_, found, _ := files.resolve(c, held, nil, mine)
		for _, p := range found {
			if !slices.Contains(before, p) {
				p.Container, p.Name = 0, ""
				p.Key = strings.TrimPrefix(p.Key, prefix)
				problems = append(problems, p)
			}
		}
	}
	if len(problems) == 0 {
		return nil
	}
	slices.SortStableFunc(problems, func(a, b Problem) int { return cmp.Compare(a.Key, b.Key) })
	return Problems(problems)
}
