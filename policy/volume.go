package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Period is the time after which a volume begins anew.
type Period string

// The periods, by the calendar of the agent's flag --volume-zone.
const (
	Daily   Period = "day"
	Monthly Period = "month"
)

// Counted is the direction that a volume counts.
type Counted string

// The directions, as seen from the container.
const (
	SentAndReceived Counted = ""
	OnlySent        Counted = "sent"
	OnlyReceived    Counted = "received"
)

// Volume is how much a container may send and receive in a period. Zero means that there is no
// bound.
type Volume struct {
	Bytes uint64
	Per   Period
	Of    Counted
	After uint64 // ceil once the volume is used up, bit/s; 0: none
}

// The bounds of a volume, in bytes.
const minVolume, maxVolume = 1e6, 1e18

// volumeUnits are those of providers and of SI, unlike sizeUnits: a volume is traffic, which has
// powers of 1000 like rates.
var volumeUnits = []unit{
	{"b", 1, 0},
	{"kb", 1e3, 0}, {"mb", 1e6, 0}, {"gb", 1e9, 0}, {"tb", 1e12, 0}, {"pb", 1e15, 0},
	{"kib", 1 << 10, 0}, {"mib", 1 << 20, 0}, {"gib", 1 << 30, 0}, {"tib", 1 << 40, 0}, {"pib", 1 << 50, 0},
}

// parseVolume reads a value such as "500gb/month" or "20gib/day sent".
func parseVolume(v string) (setter, error) {
	words := strings.FieldsFunc(v, func(r rune) bool { return r == ' ' || r == '\t' })
	if len(words) == 0 || len(words) > 2 {
		return nil, errors.New(`must be like "500gb/month", "20gb/day" or "500gb/month sent"`)
	}
	size, per, _ := strings.Cut(words[0], "/")
	out := Volume{Per: Period(strings.ToLower(per))}
	if out.Per != Daily && out.Per != Monthly {
		return nil, fmt.Errorf("must end in /%s or /%s", Daily, Monthly)
	}
	if len(words) == 2 {
		out.Of = Counted(strings.ToLower(words[1]))
		if !slices.Contains([]Counted{OnlySent, OnlyReceived}, out.Of) {
			return nil, fmt.Errorf("%s is no direction: must be %s or %s, or absent for both", quote(words[1]), OnlySent, OnlyReceived)
		}
	}
	var err error
	if out.Bytes, err = parseQuantity(size, measure{units: volumeUnits, names: "kb, mb, gb, tb, pb (powers of 1000), kib..pib (1024)"}); err != nil {
		return nil, err
	}
	if out.Bytes < minVolume || out.Bytes > maxVolume {
		return nil, errors.New("must be between 1mb and 1000pb")
	}
	return func(s *Settings) { s.Volume.Bytes, s.Volume.Per, s.Volume.Of = out.Bytes, out.Per, out.Of }, nil
}

// String formats a volume as the key net.volume takes it; "" is none.
func (v Volume) String() string {
	if v.Bytes == 0 {
		return ""
	}
	return strings.TrimSpace(fmt.Sprintf("%s/%s %s", format(v.Bytes, volumeUnits[:6]), v.Per, v.Of))
}

func volumeText(s Settings) string {
	return strings.TrimSpace(fmt.Sprintf("%s/%s %s", steps(s.Volume.Bytes, "B"), s.Volume.Per, s.Volume.Of))
}

// parseVolumeAfter reads the ceil of a used-up volume.
func parseVolumeAfter(v string) (setter, error) {
	if strings.EqualFold(v, "none") {
		return func(s *Settings) { s.Volume.After = 0 }, nil
	}
	return parseRateKey(func(s *Settings) *uint64 { return &s.Volume.After })(v)
}
