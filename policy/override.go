package policy

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/container"
)

// Override is a value set by hand for one running container. It takes precedence over files and
// labels, whether or not labels are denied.
type Override struct {
	Container container.ID `json:"container,string"`
	Key       string       `json:"key"`   // as in a file: "net.rate"
	Value     string       `json:"value"` // as in a label
	From      string       `json:"from"`  // the source in explain: "set by uid 0 at ..."
}

// overridesOf makes layers of overrides, by container. It reports and leaves out invalid values.
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

// KnownKey returns the name of a key without its label prefix, or a Problem if there is no such
// key.
func KnownKey(name string) (string, error) {
	key := strings.TrimPrefix(name, prefix)
	if _, ok := lookup(key); !ok {
		return "", Problem{Key: name, Reason: unknownKey(key, names("", ""))}
	}
	return key, nil
}

// Override replaces all values set by hand. It leaves out invalid ones; the error is then a
// [Problems].
func (s *Store) Override(all []Override) error {
	layers, problems := overridesOf(all)
	s.mu.Lock()
	defer s.mu.Unlock()
	// Cleared values must not stand in for others any more.
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

// Check returns why overrides cannot be all those of c; nil if they can. It changes nothing. The
// error is a [Problems]: of values that are invalid, or that contradict each other or files and
// labels.
func (s *Store) Check(c container.Container, overrides []Override) error {
	layers, problems := overridesOf(overrides)
	for i := range problems {
		problems[i].Container = 0 // the caller knows the container
	}
	if len(problems) == 0 {
		files := s.Policy()
		c = s.own(c)
		held := files.matching(c)
		_, before, _ := files.resolve(c, held, nil, requested(c, s.disks), nil)
		_, found, _ := files.resolve(c, held, nil, requested(c, s.disks), layers[c.ID])
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
