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

// Net is a container's share of the network in one direction. Zero means not set.
type Net struct {
	Rate     uint64        // guaranteed, bit/s
	Ceil     uint64        // upper bound, bit/s
	Weight   uint32        // share of what is not guaranteed
	Priority *int          // order for idle bandwidth; nil if not set
	Latency  time.Duration // bound on the queueing delay that this host adds
	// Split allows cutting other containers' packets into frames if Latency requires it. It is false
	// without a Latency.
	Split bool
}

// Help is the help for a container's own tasks if it has a reservation.
type Help string

// Each way includes or exceeds the one before. HelpAuto is the default.
const (
	HelpOff      Help = "off"
	HelpAuto     Help = "auto"     // off, until a reservation is missed for want of CPU
	HelpWeight   Help = "weight"   // the largest weight among its siblings, and short slices
	HelpRealtime Help = "realtime" // and its threads are real-time, within a budget
	HelpTurns    Help = "turns"    // or in turns: for the budget's part of each tenth of a second
)

// Yield is how a container makes way for the reservations of others.
type Yield string

// YieldOff changes nothing on the host and is the default.
const (
	YieldOff   Yield = "off"
	YieldAuto  Yield = "auto"  // off, until it interferes with a reservation
	YieldIdle  Yield = "idle"  // its tasks run only on idle CPU time
	YieldQuota Yield = "quota" // and only for a part of the time
)

// Interrupts chooses the CPUs of network interrupts, for the sake of a container's reserved disks.
type Interrupts string

// InterruptsOff changes nothing on the host and is the default.
const (
	InterruptsOff   Interrupts = "off"
	InterruptsAuto  Interrupts = "auto"  // off, until the network interferes with a reservation
	InterruptsApart Interrupts = "apart" // on CPUs other than those of the disks
)

// IO is a container's share of one block device. Zero means not set.
type IO struct {
	Device   string  // as written, a path below /dev
	Reserved Figures // io.reserve
	Max      Figures // io.max
}

// Figures are operations and bytes per second.
type Figures struct{ ReadIOPS, WriteIOPS, ReadBytes, WriteBytes uint64 }

// Settings are the values of policy for one container. The zero value is the default: observe, and
// change nothing.
type Settings struct {
	Egress, Ingress Net
	NetCPU          NetCPU // "" is observe
	// NetCPUReserve is the T of Iron, in parts of 1; nil: the feature's default.
	NetCPUReserve *float64
	// NetCPUSteal is the CPU time that packets may take from others before auto or isolate acts, in parts
	// of 1; nil: the feature's default. With 0 isolate always acts.
	NetCPUSteal *float64
	Latency     *bool // nil: the default of the feature
	Overlay     *bool
	IOWeight    uint32
	IO          []IO
	IOYield     Yield // "" is off
	Interrupts  Interrupts
	IOHelp      Help // "" is auto
	// Realtime is the CPU time in each second of each CPU that is reserved for IOHelp to make the
	// container's threads real-time, and the most that it takes; 0: what others leave.
	Realtime time.Duration
	// RealtimeAuto replaces Realtime by the time that the reservations need, according to the profiles of
	// their disks.
	RealtimeAuto bool
}

// Origin is the source of a value, for explain: a file and line, or a label.
type Origin struct {
	Key   string // as in the schema: "fairlead.netcpu"
	Value string // as written
	From  string // "label", "annotation", "image label", "request of ...", "controller", that of an Override, or the path of a file
	Line  int    // in the file; 0 otherwise

	// For a controller's decision: the value of policy that it replaces, as String formats it, its reason
	// and its start.
	Instead string
	Reason  string
	Since   time.Time
}

// Target holds the settings of one container at present. Package agent passes it to every feature, and
// a feature reads its own part of Settings.
type Target struct {
	Container container.Container
	Settings  Settings
	Origins   []Origin // one for each key that is set, sorted by key
	// Refused lists labels for keys that this container's labels may not set. They are among its Problems,
	// too.
	Refused []Problem

	// Expiry is when the Target lapses because of a controller's decision; zero for policy, which holds
	// until it changes.
	Expiry time.Time
	// Decided is when a controller's decision lapses, by the key that it decides.
	Decided map[string]time.Time
}

// Until returns when the value of a key, as in the schema ("fairlead.netcpu"), lapses: with the
// decision, if a controller made one for this key. It is zero for a value of policy, which holds until
// it changes, whatever is decided about other keys.
func (t Target) Until(key string) time.Time { return t.Decided[key] }

// InForce returns the netcpu mode in force. A container in the mode isolate pays for its packets while
// a controller decides so, and always if it may take nothing from others. Until then it is free, as in
// the mode auto.
func (t Target) InForce() NetCPU {
	always := t.Settings.NetCPUSteal != nil && *t.Settings.NetCPUSteal == 0
	if t.Settings.NetCPU == NetCPUIsolate && !always && t.Until(prefix+"netcpu").IsZero() {
		return NetCPUAuto
	}
	return t.Settings.NetCPU
}

// Effective lists the values that hold for the container, in the order of the schema: policy's values,
// and for other keys the default, if there is one, with From "default".
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

// printableValue quotes a value only if its form is unusual.
func printableValue(v string) string {
	odd := func(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }
	if v == "" || strings.ContainsFunc(v, odd) {
		return quote(v)
	}
	return v
}

// Understood returns the value of a key in common terms: "20.0 Mbit/s" for 20mbit, "on" for True. It
// returns "" if the value already has this form, or is invalid. key may have the prefix of a label;
// value may be that of Kubernetes' annotation for the key.
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

// rateText formats bit/s with one digit after the point; "" for none.
func rateText(n uint64) string { return steps(n, "bit/s") }

// byteText formats the figures of devices that count bytes.
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

// steps formats n in the largest unit of which it has at least one.
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
