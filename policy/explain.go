package policy

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Effective lists what holds for the container, key by key in the order of the schema: policy's
// values, and the defaults of the other keys that have one, with From "default".
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

// String returns the key, its value and its source, in one line that is safe to print:
// "fairlead.netcpu=isolate (/etc/.../10-web.yaml:7)".
func (o Origin) String() string {
	return fmt.Sprintf("%s=%s (%s)", plain(o.Key), printableValue(o.Value), o.place())
}

// printableValue keeps values of the usual form as they are.
func printableValue(v string) string {
	odd := func(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }
	if v == "" || strings.ContainsFunc(v, odd) {
		return quote(v)
	}
	return v
}

// Understood returns the value of a key in common terms: "20.0 Mbit/s" for 20mbit, "on" for True.
// It is "" if the value is already in these, or invalid. key may have the prefix of a label; value
// may be that of Kubernetes' annotation for it.
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

// rateText returns bit/s with one digit after the point, "" for none.
func rateText(n uint64) string { return steps(n, "bit/s") }

// byteText returns the figures of devices that count bytes.
func byteText(ios []IO, figures func(*IO) []*uint64) string {
	return formatDevices(ios, figures, func(name string, n uint64) string {
		if !strings.HasSuffix(name, "bps") {
			return ""
		}
		return " " + name + " " + steps(n, "B/s")
	})
}

func percentText(share float64) string {
	return strconv.FormatFloat(math.Round(share*1e6)/1e4, 'f', -1, 64) + "%"
}

// steps returns n in the largest unit that it has at least one of.
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
