package policy

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// NetCPU is the mode of the netcpu feature for one container.
type NetCPU string

// The modes of netcpu. Observe changes nothing on the host and is the default.
const (
	NetCPUObserve NetCPU = "observe"
	NetCPUCharge  NetCPU = "charge"
	NetCPUIsolate NetCPU = "isolate"
	NetCPUAuto    NetCPU = "auto"
)

// Net is what a container is due of the network in one direction. Zero means not asked for.
type Net struct {
	Rate     uint64        // guaranteed, bit/s
	Ceil     uint64        // upper bound, bit/s
	Weight   uint32        // share of what is not guaranteed
	Priority *int          // order for idle bandwidth; nil if not set
	Latency  time.Duration // bound on the queueing delay that this host adds
	// Split allows cutting packets of others into frames if Latency requires it. It is false
	// without a Latency.
	Split bool
}

// Help is what is done for a container's own tasks where it has reserved something.
type Help string

// The ways, each more than the one before. HelpAuto is the default.
const (
	HelpOff      Help = "off"
	HelpAuto     Help = "auto"     // off, until a reservation is missed for want of CPU
	HelpWeight   Help = "weight"   // the largest weight among its siblings, and short slices
	HelpRealtime Help = "realtime" // and its threads are real-time, within a budget
	HelpTurns    Help = "turns"    // or are so in turns: for the budget's part of each tenth of a second
)

// Yield is how a container makes way for the reservations of others.
type Yield string

// The ways. YieldOff changes nothing on the host and is the default.
const (
	YieldOff   Yield = "off"
	YieldAuto  Yield = "auto"  // off, until it is in the way of a reservation
	YieldIdle  Yield = "idle"  // its tasks run only on idle CPU time
	YieldQuota Yield = "quota" // and for a part of the time only
)

// Interrupts is where the interrupts of the network are served, for the sake of a container's
// reserved disks.
type Interrupts string

// The ways. InterruptsOff changes nothing on the host and is the default.
const (
	InterruptsOff   Interrupts = "off"
	InterruptsAuto  Interrupts = "auto"  // off, until the network is in the way of a reservation
	InterruptsApart Interrupts = "apart" // on other CPUs than those of the disks
)

// IO is what a container is due of one block device. Zero means not asked for.
type IO struct {
	Device   string  // as written, a path below /dev
	Reserved Figures // (reserve)
	Max      Figures // caps (max)
}

// Figures are operations and bytes per second.
type Figures struct{ ReadIOPS, WriteIOPS, ReadBytes, WriteBytes uint64 }

// Settings are policy's values for one container. The zero value is the default: observe, and
// nothing changed.
type Settings struct {
	Egress, Ingress Net
	NetCPU          NetCPU // "" is observe
	// NetCPUReserve is the T of Iron, in parts of 1; nil: the default of the
	// feature.
	NetCPUReserve *float64
	// NetCPUSteal is the CPU time that packets may take from others before auto or isolate acts, in
	// parts of 1; nil: the default of the feature. With 0 isolate always acts.
	NetCPUSteal *float64
	Latency     *bool // nil: the default of the feature
	Overlay     *bool
	IOWeight    uint32
	IO          []IO
	IOYield     Yield // "" is off
	Interrupts  Interrupts
	IOHelp      Help // "" is auto
	// Realtime is the CPU time in each second of each CPU that is kept for IOHelp to make the
	// container's threads real-time, and the most that it takes; 0 is what others leave.
	Realtime time.Duration
	// RealtimeAuto replaces Realtime: as much as the reservations need, by the profiles of their
	// disks.
	RealtimeAuto bool
}

// Origin is the source of a value, for explain: the file and line, or the label.
type Origin struct {
	Key   string // as in the schema: "fairlead.netcpu"
	Value string // as written
	From  string // "label", "annotation", "image label", "request of ...", "controller", that of an Override, or the path of a file
	Line  int    // in the file; 0 otherwise

	// Of a controller: the value of policy that is replaced, as String formats it, and the reason
	// and the start of the decision.
	Instead string
	Reason  string
	Since   time.Time
}

// Target is what one container is due now. Package agent passes it to every feature; a feature
// reads its own part of Settings.
type Target struct {
	Container container.Container
	Settings  Settings
	Origins   []Origin // one for each key that is set, sorted by key
	// Refused are the labels that ask for what labels of this container do not count
	// for. They are among its Problems, too.
	Refused []Problem

	// Expiry is when the Target lapses, for a controller's decision; zero for policy, which holds
	// until it is changed.
	Expiry time.Time
	// Decided says of the keys that a controller has decided about when that lapses.
	Decided map[string]time.Time
}

// Until is when what t says for a key, as in the schema ("fairlead.netcpu"), lapses: with
// the decision, if one was made about it. What policy itself says holds until it is changed
// (zero), whatever is decided about other keys.
func (t Target) Until(key string) time.Time { return t.Decided[key] }

// InForce returns the mode of netcpu in force. A container in the mode isolate pays for its packets
// while a controller says so, and always if it may take nothing from others. Until then it is free,
// as in the mode auto.
func (t Target) InForce() NetCPU {
	always := t.Settings.NetCPUSteal != nil && *t.Settings.NetCPUSteal == 0
	if t.Settings.NetCPU == NetCPUIsolate && !always && t.Until(prefix+"netcpu").IsZero() {
		return NetCPUAuto
	}
	return t.Settings.NetCPU
}

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
