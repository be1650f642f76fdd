package policy

import (
	"fmt"
	"math"
	"slices"
	"strconv"
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
	return ok && !slices.Contains(k.Built, o.Value) && !slices.Contains(k.Built, AnyValue) && !isOff(o.Value)
}

func isOff(value string) bool {
	on, err := onOff(value)
	return err == nil && !on
}

// Understood gives the value of a key in the words that are common elsewhere:
// "20.0 Mbit/s" for 20mbit, "on" for True. It is "" where the value says so
// already, or is none. key may have the prefix of a label; value may be that of
// Kubernetes' annotation for it.
func Understood(key, value string) string {
	k, _ := lookup(strings.TrimPrefix(key, prefix))
	if k.show == nil {
		return ""
	}
	set, err := k.parseValue(value)
	if err != nil {
		if set, err = parseAnnotation(k, value); err != nil {
			return ""
		}
	}
	var s Settings
	set(&s)
	if text := k.show(s); text != value {
		return text
	}
	return ""
}

// rateText gives bit/s with one digit after the point, "" for none.
func rateText(n uint64) string { return steps(n, "bit/s") }

// byteText gives the figures of devices that count bytes.
func byteText(ios []IO, figures func(*IO) []*uint64) string {
	var devices []string
	for _, io := range ios {
		text := io.Device
		for i, n := range figures(&io) {
			if name := ioFigures()[i]; *n != 0 && strings.HasSuffix(name, "bps") {
				text += " " + name + " " + steps(*n, "B/s")
			}
		}
		if text != io.Device {
			devices = append(devices, text)
		}
	}
	return strings.Join(devices, "; ")
}

func percentText(share float64) string {
	return strconv.FormatFloat(math.Round(share*1e6)/1e4, 'f', -1, 64) + "%"
}

// steps gives n in the largest unit of which it is at least one.
func steps(n uint64, unit string) string {
	const step = 1000
	value, scale := float64(n), ""
	for _, next := range []string{"k", "M", "G", "T"} {
		if value < step {
			break
		}
		value, scale = value/step, next
	}
	if scale == "" {
		return fmt.Sprintf("%d %s", n, unit)
	}
	return fmt.Sprintf("%.1f %s%s", value, scale, unit)
}
