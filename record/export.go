package record

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// Choice says what Export writes.
type Choice struct {
	From, To  time.Time // as of Reader.Frames
	Anonymous bool      // without names, images, labels, paths, addresses and ids of runtimes
	Words     []string  // with Anonymous: words beside those of this package that stay, such as keys of policy
}

// Exported is what Export has written.
type Exported struct {
	Frames      int
	First, Last time.Time // of the frames, in the order of recording
	Damaged     int       // parts of the recording that could not be read
}

// Export writes frames of a recording to out, in the form of one file that Open reads. After an error
// what was written is of no use.
func (r *Reader) Export(out io.Writer, c Choice) (done Exported, err error) {
	var b blocks
	hide := newAnonymous(c.Words)
	for f, err := range r.Frames(context.Background(), c.From, c.To, 0) {
		if errors.Is(err, ErrDamaged) {
			done.Damaged++
			continue
		}
		if err != nil {
			return done, err
		}
		if c.Anonymous {
			f = hide.frame(f)
		}
		data, err := b.frame(f, done.Frames == 0)
		if err == nil {
			_, err = out.Write(data)
		}
		if err != nil {
			return done, fmt.Errorf("export recording: %w", err)
		}
		if done.Frames == 0 {
			done.First = f.Taken
		}
		done.Frames, done.Last = done.Frames+1, f.Taken
	}
	return done, nil
}

// anonymous leaves out of frames what says whose host it is. Numbers and words of fairlead's own stay.
// A name becomes another one, the same each time ("container-7"), and so do numbers of containers and
// namespaces. Everything else that is text is left out: what it does not know cannot get through.
type anonymous struct {
	words   map[string]bool
	names   map[[2]string]string // by class and name
	counts  map[string]int       // of names, by class
	numbers map[[2]any]uint64    // by class and number
}

// newAnonymous returns an anonymous that also lets words through.
func newAnonymous(words []string) *anonymous {
	a := &anonymous{words: make(map[string]bool), names: make(map[[2]string]string), counts: make(map[string]int), numbers: make(map[[2]any]uint64)}
	for _, w := range slices.Concat(ownWords(), words) {
		a.words[w] = true
	}
	for f := range reflect.TypeFor[api.Reports]().Fields() { // the features
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		a.words[name] = true
	}
	return a
}

// ownWords are words that stand for something in the API, and names of the kernel's things.
func ownWords() []string {
	return []string{
		api.StatePending, api.StateDone, api.StatePartly, api.StateError, api.StateHeld, api.StateKept, api.StateUnavailable,
		"docker", "podman", "containerd", "sandbox", "cgroup", "label", "annotation", "controller", "default",
		"veth", "macvlan", "ipvlan", "vxlan", "geneve", "ipip", "wireguard", "openvswitch", "routed", "bridged",
		"egress", "ingress", "receive", "send", "tcp", "udp", "icmp", "other", "encapsulated", "xdp", "tc",
		"task", "napi", "ksoftirqd", "idle", "peer",
		"device", "deliver", "forward", "qdisc", "gro", "socket", "added", "stack", "local",
		"off", "on", "left alone", "killed", "slow", "fast", "end", "flow", "remote",
		"verified", "seen", "unverified", "exceeded", "best effort", "met", "asks less", "short", "throttled", "stolen", "interference", "lost",
		"action", "release", "over", "groups", "deadline", "none", "mq-deadline", "bfq", "kyber",
		"auto", "charge", "isolate", "weight", "full", "deny", "host", "image",
		"(CPU quota)", "(real-time budget)", "(hypervisor)",
	}
}

// amount matches a value of policy that is a number with its unit.
var amount = regexp.MustCompile(`^[0-9]{1,12}(\.[0-9]{1,6})?([kmgt]i?)?(bit|bps|b|%|ns|us|ms|s|m|h|iops)?(/(s|day|month))?$`)

// classOf returns what the names in a field are names of, "" if it has none.
func classOf(owner, name string) string {
	switch {
	case name == "Name" && (owner == "Interface" || owner == "HostEnd"),
		slices.Contains([]string{"Device", "Uplink", "Uplinks", "Master", "Bridge"}, name):
		return "device"
	case slices.Contains([]string{"Name", "VictimName", "CulpritName", "By", "Sharer"}, name):
		return "container"
	case slices.Contains([]string{"Pod", "Namespace", "Image", "Network", "Disk"}, name):
		return strings.ToLower(name)
	}
	return ""
}

// frame returns f without names. It shares no memory with f.
func (a *anonymous) frame(f api.Frame) api.Frame {
	a.value(reflect.ValueOf(&f).Elem(), "", "")
	return f
}

// value replaces what v consists of, and copies what lies behind pointers. v is a field of a struct
// type, or behind such a field.
func (a *anonymous) value(v reflect.Value, owner, name string) {
	switch {
	case v.Type() == reflect.TypeFor[time.Time]():
	case v.Type() == reflect.TypeFor[api.ID](), v.Kind() == reflect.Uint64 && name == "NetNS":
		v.SetUint(a.number(v.Type().Name(), v.Uint()))
	case name == "PID", name == "VNI", v.Kind() == reflect.Map:
		v.SetZero()
	case v.Kind() == reflect.String:
		v.SetString(a.text(owner, name, v.String()))
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			a.value(v.Field(i), v.Type().Name(), v.Type().Field(i).Name)
		}
	case v.Kind() == reflect.Pointer && !v.IsNil():
		to := reflect.New(v.Type().Elem())
		to.Elem().Set(v.Elem())
		a.value(to.Elem(), owner, name)
		v.Set(to)
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.String && classOf(owner, name) == "":
		v.SetZero()
	case v.Kind() == reflect.Slice && !v.IsNil():
		list := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		reflect.Copy(list, v)
		for i := range list.Len() {
			a.value(list.Index(i), owner, name)
		}
		v.Set(list)
	}
}

// text returns what stands for a text.
func (a *anonymous) text(owner, name, s string) string {
	class := classOf(owner, name)
	switch {
	case s == "":
		return ""
	case class == "" && a.words[s], class != "" && s[0] == '(' && a.words[s]:
		return s
	case class != "":
		k := [2]string{class, s}
		if a.names[k] == "" {
			a.counts[class]++
			a.names[k] = fmt.Sprintf("%s-%d", class, a.counts[class])
		}
		return a.names[k]
	case owner == "Setting" && name == "Value" && amount.MatchString(s):
		return s
	}
	return ""
}

// number returns what stands for a number; 0 for 0.
func (a *anonymous) number(class string, n uint64) uint64 {
	if n == 0 {
		return 0
	}
	k := [2]any{class, n}
	if a.numbers[k] == 0 {
		a.numbers[k] = uint64(len(a.numbers)) + 1
	}
	return a.numbers[k]
}
