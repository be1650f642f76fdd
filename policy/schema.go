package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// prefix precedes the name of a key in a label.
const prefix = "fairlead."

// The range of sensible values. A value outside is taken for a mistake. The range of a rate is that of
// Kubernetes' annotations.
const (
	minRate, maxRate       = 1e3, 1e15 // bit/s
	minLatency, maxLatency = 10 * time.Microsecond, 10 * time.Second
	// With more, real-time threads would leave too little to the host.
	minRealtime, maxRealtime = time.Millisecond, 500 * time.Millisecond
	maxWeight                = 10000 // as in cgroup v2
	maxPriority              = 65535
	maxReserve               = 0.99       // with nothing left, no packet would ever arrive
	minSteal, maxSteal       = 0.001, 1.0 // a smaller share cannot be told from no traffic

	onOthers = "it acts on others than the container" // the reason why labels count only if a file says so
	pastHost = "it takes packets past the host's own rules"
)

// Key describes one key of the schema, for documentation and completion.
type Key struct {
	Name    string // without the prefix "fairlead.": "net.rate"
	Feature string // the folder below feature/ of the feature that puts it in force
	Form    string // the form of its values
	Example string // one value
	Default string // the value that holds without the key; "" is none
	Meaning string
	Column  bool // `fairlead ps` shows its value in the feature's column
	// Host is the reason why labels count for the key only under "labels: host" in a file; "": they count.
	Host string

	// parse checks a value, and returns a function that writes it into Settings.
	parse func(string) (setter, error)
	// show formats the value in Settings in common terms; nil: the value as written.
	show func(Settings) string
	list bool // a YAML list may stand for the value; it is joined by ";"
}

// setter writes a copy of one value into Settings.
type setter func(s *Settings)

// Schema lists the keys in the order of the documentation. The caller must not change the list, because
// every look at a container reads it.
func Schema() []Key { return schema }

// FeatureOf returns the feature that puts a key into force, "" for an unknown key. The key is as in a
// label: "fairlead.net.rate".
func FeatureOf(key string) string {
	i := slices.IndexFunc(schema, func(k Key) bool { return prefix+k.Name == key })
	if i < 0 {
		return ""
	}
	return schema[i].Feature
}

// schema is constant.
var schema = slices.Concat(
	netKeys("net.", "from the container", func(s *Settings) *Net { return &s.Egress }),
	netKeys("net.ingress.", "towards the container", func(s *Settings) *Net { return &s.Ingress }),
	[]Key{
		{Name: "netcpu", Feature: "netcpu", Form: "observe, charge, isolate, auto", Example: "isolate", Default: "observe", Column: true,
			Meaning: "what is done about the CPU time that the container's packets take",
			parse:   parseWord(func(s *Settings) *NetCPU { return &s.NetCPU }, NetCPUObserve, NetCPUCharge, NetCPUIsolate, NetCPUAuto), show: func(s Settings) string { return string(s.NetCPU) }},
		{Name: "netcpu.reserve", Feature: "netcpu", Form: "0%..99%; 5% if it is not set", Example: "5%",
			Meaning: "how much of its budget a charged container has left when its incoming packets are dropped",
			parse:   parseShare(0, maxReserve, func(s *Settings) **float64 { return &s.NetCPUReserve }), show: func(s Settings) string { return percentText(*s.NetCPUReserve) }},
		{Name: "netcpu.steal", Feature: "netcpu", Form: "0.1%..100% of a CPU, or 0%; 3% if it is not set", Example: "3%",
			Meaning: "how much of a CPU the container's packets may take from others before isolate or auto acts; with 0% isolate always does",
			parse:   parseNetCPUSteal, show: func(s Settings) string { return percentText(*s.NetCPUSteal) }},
		{Name: "latency", Feature: "latency", Form: "off, on", Example: "on", Default: "off",
			Meaning: "histograms of the delay that this host adds to packets",
			parse:   parseSwitch(func(s *Settings) **bool { return &s.Latency }), show: func(s Settings) string { return onOffText(*s.Latency) }},
		{Name: "overlay", Feature: "overlay", Form: "off, on", Example: "on", Default: "off", Host: pastHost,
			Meaning: "a short path through this host for known flows of an overlay network",
			parse:   parseSwitch(func(s *Settings) **bool { return &s.Overlay }), show: func(s Settings) string { return onOffText(*s.Overlay) }},
		{Name: "io.reserve", Feature: "blockio", Form: "devices, each with riops=N, wiops=N, rbps=SIZE, wbps=SIZE", Example: "/dev/vdb riops=2000 wiops=500", list: true,
			Meaning: "reserved operations or bytes per second of a block device",
			parse:   parseDevices(reserved), show: func(s Settings) string { return byteText(s.IO, reserved) }},
		{Name: "io.weight", Feature: "blockio", Form: "1..10000", Example: "200", Default: "100",
			Meaning: "share of block devices that divide by weight, among containers of one parent",
			parse:   parseWeight(func(s *Settings) *uint32 { return &s.IOWeight })},
		{Name: "io.max", Feature: "blockio", Form: "devices, each with rbps=SIZE, wbps=SIZE, riops=N, wiops=N", Example: "/dev/vdb rbps=50mb wiops=500", list: true,
			Meaning: "cap on bytes or operations per second of a block device",
			parse:   parseDevices(capped), show: func(s Settings) string { return byteText(s.IO, capped) }},
		{Name: "io.yield", Feature: "blockio", Form: "off, auto, idle, quota", Example: "auto", Default: "off",
			Meaning: "how the container makes way for the reservations of others",
			parse:   parseWord(func(s *Settings) *Yield { return &s.IOYield }, YieldOff, YieldAuto, YieldIdle, YieldQuota), show: func(s Settings) string { return string(s.IOYield) }},
		{Name: "io.help", Feature: "blockio", Form: "off, auto, weight, realtime, turns", Example: "off", Default: "auto", Host: onOthers,
			Meaning: "what is done for the container's own tasks while its reservation is missed because others have the CPUs",
			parse:   parseWord(func(s *Settings) *Help { return &s.IOHelp }, HelpOff, HelpAuto, HelpWeight, HelpRealtime, HelpTurns), show: func(s Settings) string { return string(s.IOHelp) }},
		{Name: "io.interrupts", Feature: "blockio", Form: "off, auto, apart", Example: "auto", Default: "off", Host: onOthers,
			Meaning: "whether the network's interrupts are kept off the CPUs that serve the disks of its reservations",
			parse:   parseWord(func(s *Settings) *Interrupts { return &s.Interrupts }, InterruptsOff, InterruptsAuto, InterruptsApart), show: func(s Settings) string { return string(s.Interrupts) }},
		{Name: "io.realtime", Feature: "blockio", Form: "1ms..500ms, auto", Example: "100ms", Host: onOthers,
			Meaning: "time in each second of each CPU that is kept for io.help to make its threads real-time, and the most that it takes; auto: as its reservations need, by the disk's profile",
			parse: func(v string) (setter, error) {
				if strings.EqualFold(v, "auto") {
					return func(s *Settings) { s.Realtime, s.RealtimeAuto = 0, true }, nil
				}
				d, err := ParseDuration(v)
				if err == nil && (d < minRealtime || d > maxRealtime) {
					err = fmt.Errorf("must be between %s and %s", minRealtime, maxRealtime)
				}
				return func(s *Settings) { s.Realtime, s.RealtimeAuto = d, false }, err
			}},
	},
)

// netKeys returns the keys of one direction.
func netKeys(group, way string, net func(*Settings) *Net) []Key {
	return []Key{
		{Name: group + "rate", Feature: "traffic", Form: "rate, 1kbit..1000tbit", Example: "50mbit", Meaning: "guaranteed bandwidth " + way,
			parse: parseRateKey(func(s *Settings) *uint64 { return &net(s).Rate }), show: func(s Settings) string { return rateText(net(&s).Rate) }},
		{Name: group + "ceil", Feature: "traffic", Form: "rate, 1kbit..1000tbit", Example: "200mbit", Default: "the link", Meaning: "upper bound on bandwidth " + way,
			parse: parseRateKey(func(s *Settings) *uint64 { return &net(s).Ceil }), show: func(s Settings) string { return rateText(net(&s).Ceil) }},
		{Name: group + "weight", Feature: "traffic", Form: "1..10000", Example: "2", Default: "1", Meaning: "share of what is not guaranteed, " + way,
			parse: parseWeight(func(s *Settings) *uint32 { return &net(s).Weight })},
		{Name: group + "priority", Feature: "traffic", Form: "0..65535, the smaller is served first", Example: "1", Meaning: "order for idle bandwidth, " + way,
			parse: func(v string) (setter, error) {
				n, err := parseInteger(v, 0, maxPriority)
				return func(s *Settings) { p := int(n); net(s).Priority = &p }, err
			}},
		{Name: group + "latency", Feature: "traffic", Form: "time, 10us..10s", Example: "2ms", Meaning: "bound on the queueing delay that this host adds, " + way,
			parse: func(v string) (setter, error) {
				d, err := ParseDuration(v)
				if err == nil && (d < minLatency || d > maxLatency) {
					err = fmt.Errorf("must be between 10us and 10s")
				}
				return func(s *Settings) { net(s).Latency = d }, err
			}, show: func(s Settings) string { return net(&s).Latency.String() }},
		{Name: group + "latency.split", Feature: "traffic", Form: "off, on; off if it is not set", Example: "on", Host: onOthers, Meaning: "whether packets of others may be cut into frames for that bound, " + way,
			parse: func(v string) (setter, error) {
				on, err := onOff(v)
				return func(s *Settings) { net(s).Split = on }, err
			}, show: func(s Settings) string { return onOffText(net(&s).Split) }},
	}
}

func parseRateKey(field func(*Settings) *uint64) func(string) (setter, error) {
	return func(v string) (setter, error) {
		r, err := ParseRate(v)
		if err == nil {
			err = saneRate(r)
		}
		return func(s *Settings) { *field(s) = r }, err
	}
}

func saneRate(r uint64) error {
	if r < minRate || r > maxRate {
		return fmt.Errorf("%s is not between %s and %s", FormatRate(r), FormatRate(minRate), FormatRate(maxRate))
	}
	return nil
}

func parseWeight(field func(*Settings) *uint32) func(string) (setter, error) {
	return func(v string) (setter, error) {
		n, err := parseInteger(v, 1, maxWeight)
		return func(s *Settings) { *field(s) = uint32(n) }, err
	}
}

// parseSwitch parses a switch with a default that its feature chooses.
func parseSwitch(field func(*Settings) **bool) func(string) (setter, error) {
	return func(v string) (setter, error) {
		on, err := onOff(v)
		return func(s *Settings) { b := on; *field(s) = &b }, err
	}
}

// onOff reads a switch in all forms of YAML 1.1, because tools that write YAML change on and off into
// any of them: docker-compose 1.29 into True and False.
func onOff(v string) (bool, error) {
	switch strings.ToLower(v) {
	case "on", "true", "yes", "y":
		return true, nil
	case "off", "false", "no", "n":
		return false, nil
	}
	return false, errors.New("must be on or off")
}

func onOffText(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// parseWord parses one of several words, in any case. If off is among the words, any form of it that a
// switch may have counts.
func parseWord[W ~string](field func(*Settings) *W, words ...W) func(string) (setter, error) {
	return func(v string) (setter, error) {
		var known []string
		on, err := onOff(v)
		for _, w := range words {
			if strings.EqualFold(v, string(w)) || err == nil && !on && w == "off" {
				return func(s *Settings) { *field(s) = w }, nil
			}
			known = append(known, string(w))
		}
		return nil, errors.New("must be one of " + strings.Join(known, ", "))
	}
}

func parseShare(low, high float64, field func(*Settings) **float64) func(string) (setter, error) {
	return func(v string) (setter, error) {
		share, err := parsePercent(v)
		if err == nil && (share < low || share > high) {
			err = fmt.Errorf("must be between %s and %s", percentText(low), percentText(high))
		}
		return func(s *Settings) { t := share; *field(s) = &t }, err
	}
}

func parseNetCPUSteal(v string) (setter, error) {
	share, err := parsePercent(v)
	if err == nil && share != 0 && (share < minSteal || share > maxSteal) {
		err = fmt.Errorf("must be 0%%, or between %v%% and %v%%", 100*minSteal, 100*maxSteal)
	}
	return func(s *Settings) { t := share; s.NetCPUSteal = &t }, err
}

func lookup(name string) (Key, bool) {
	i := slices.IndexFunc(schema, func(k Key) bool { return k.Name == name })
	if i < 0 {
		return Key{}, false
	}
	return schema[i], true
}

// names lists the keys that begin with before, each with after put in front.
func names(before, after string) []string {
	var ns []string
	for _, k := range schema {
		if strings.HasPrefix(k.Name, before) {
			ns = append(ns, after+k.Name)
		}
	}
	return ns
}

// maxValue bounds the bytes of one value.
const maxValue = 4096

// parseValue checks value against the key; the error is a Problem's Reason.
func (k Key) parseValue(value string) (setter, error) {
	switch {
	case value == "":
		return nil, errors.New("must not be empty")
	case len(value) > maxValue:
		return nil, fmt.Errorf("is longer than %d bytes", maxValue)
	}
	return k.parse(value)
}

// conflict is a set of keys with values that cannot hold together.
type conflict struct {
	keys   []string
	reason string
}

// conflicts finds impossible combinations in one container's settings.
func conflicts(s Settings) []conflict {
	var cs []conflict
	for _, d := range []struct {
		group string
		net   Net
	}{{"net.", s.Egress}, {"net.ingress.", s.Ingress}} {
		if d.net.Ceil != 0 && d.net.Rate > d.net.Ceil {
			cs = append(cs, conflict{
				keys:   []string{d.group + "rate", d.group + "ceil"},
				reason: fmt.Sprintf("%srate %s is more than %sceil %s", d.group, FormatRate(d.net.Rate), d.group, FormatRate(d.net.Ceil)),
			})
		}
	}
	for _, io := range s.IO {
		for _, d := range []struct {
			name          string
			reserved, cap uint64
		}{
			{"riops", io.Reserved.ReadIOPS, io.Max.ReadIOPS}, {"wiops", io.Reserved.WriteIOPS, io.Max.WriteIOPS},
			{"rbps", io.Reserved.ReadBytes, io.Max.ReadBytes}, {"wbps", io.Reserved.WriteBytes, io.Max.WriteBytes},
		} {
			if d.cap != 0 && d.reserved > d.cap {
				return append(cs, conflict{
					keys:   []string{"io.reserve", "io.max"},
					reason: fmt.Sprintf("io.reserve %s %s=%d is more than io.max %s=%d", io.Device, d.name, d.reserved, d.name, d.cap),
				})
			}
		}
	}
	return cs
}
