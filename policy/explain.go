package policy

import (
	"fmt"
	"slices"
	"strings"
)

// Effective lists what holds for the container, key by key in the order of the
// schema: what policy sets, and the defaults of the other keys that have one,
// with From "default".
func (t Target) Effective() []Origin {
	var os []Origin
	for _, k := range schema {
		i := slices.IndexFunc(t.Origins, func(o Origin) bool { return o.Key == prefix+k.Name })
		switch {
		case i >= 0:
			os = append(os, t.Origins[i])
		case k.Default != "":
			os = append(os, Origin{Key: prefix + k.Name, Value: k.Default, From: "default"})
		}
	}
	return os
}

// String gives the key, its value and where that comes from, in one line that
// is safe to print: "fairlead.netcpu=isolate (/etc/.../10-web.yaml:7)".
func (o Origin) String() string {
	return fmt.Sprintf("%s=%s (%s)", plain(o.Key), printableValue(o.Value), o.place())
}

// printableValue leaves values of the usual form as they are.
func printableValue(v string) string {
	for _, r := range v {
		if r < ' ' || r > '~' || r == '"' || r == '\\' {
			return quote(v)
		}
	}
	if v == "" {
		return quote(v)
	}
	return v
}

// Unavailable lists the Origins of the settings that are valid but have no
// effect, since this build has nothing that could put them in force. To turn
// off what is not there is no such setting.
func (t Target) Unavailable() []Origin {
	var os []Origin
	for _, o := range t.Origins {
		if unbuilt(o) {
			os = append(os, o)
		}
	}
	return os
}

// Unavailable lists the settings of the files that are valid but have no
// effect in this build, in order of precedence.
func (p *Policy) Unavailable() []Problem {
	var ps []Problem
	for _, r := range p.rules {
		from := len(ps)
		for key, e := range r.layer {
			if unbuilt(e.origin) {
				ps = append(ps, Problem{File: e.origin.From, Line: e.origin.Line, Column: e.column, Key: key, Value: e.origin.Value, Reason: NotAvailable})
			}
		}
		sortByPlace(ps[from:])
	}
	return ps
}

// NotAvailable is the reason why a valid setting has no effect.
const NotAvailable = "not available in this build"

func unbuilt(o Origin) bool {
	k, ok := lookup(strings.TrimPrefix(o.Key, prefix))
	return ok && !slices.Contains(k.Built, o.Value) && !slices.Contains(k.Built, AnyValue) && o.Value != "off" && o.Value != "false"
}
