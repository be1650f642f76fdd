package policy

import (
	"errors"
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"time"
)

// unit is a suffix and its value.
type unit struct {
	suffix string
	num    uint64 // in base units
	den    uint64 // divides num; 0 is 1
}

// Unit describes the form of one kind of value, for people.
type Unit struct{ Name, Forms string }

// Units lists the kinds of values that have units.
func Units() []Unit {
	return []Unit{
		{"rate", "bit, kbit, mbit, gbit, tbit (powers of 1000), kibit, mibit, gibit, tibit (1024) a second; a bare number is bits a second. Not bps, M or MB: they may be bits or bytes"},
		{"size", "b, k or kb, m or mb, g or gb (powers of 1024) of bytes a second, kbit, mbit, gbit of bits; a bare number is bytes a second"},
		{"time", "us, ms, s"},
		{"share", "5% or 5"},
		{"switch", "on or true or yes, off or false or no"},
	}
}

// measure describes a kind of quantity.
type measure struct {
	units []unit
	names string // of the units, for people
	exact bool   // case matters
	// hint suggests a replacement for an unknown unit; "" means the names. nil: always.
	hint func(number, suffix string) string
}

// rateUnits are the units of tc(8), in bit/s, without its "bps", which means bytes per second there and
// bits everywhere else.
var rateUnits = []unit{
	{"", 1, 0}, {"bit", 1, 0},
	{"kbit", 1e3, 0}, {"mbit", 1e6, 0}, {"gbit", 1e9, 0}, {"tbit", 1e12, 0},
	{"kibit", 1 << 10, 0}, {"mibit", 1 << 20, 0}, {"gibit", 1 << 30, 0}, {"tibit", 1 << 40, 0},
}

// sizeUnits are the units of tc(8), in bytes: k, m and g are powers of 1024.
var sizeUnits = []unit{
	{"", 1, 0}, {"b", 1, 0},
	{"k", 1 << 10, 0}, {"kb", 1 << 10, 0}, {"m", 1 << 20, 0}, {"mb", 1 << 20, 0}, {"g", 1 << 30, 0}, {"gb", 1 << 30, 0},
	{"kbit", 1 << 10, 8}, {"mbit", 1 << 20, 8}, {"gbit", 1 << 30, 8},
}

var timeUnits = []unit{{"us", 1e3, 0}, {"ms", 1e6, 0}, {"s", 1e9, 0}}

// bandwidthUnits are the suffixes of a Kubernetes quantity, in bit/s. They are case-sensitive.
var bandwidthUnits = []unit{
	{"m", 1, 1000}, {"", 1, 0}, {"k", 1e3, 0}, {"M", 1e6, 0}, {"G", 1e9, 0}, {"T", 1e12, 0}, {"P", 1e15, 0}, {"E", 1e18, 0},
	{"Ki", 1 << 10, 0}, {"Mi", 1 << 20, 0}, {"Gi", 1 << 30, 0}, {"Ti", 1 << 40, 0}, {"Pi", 1 << 50, 0}, {"Ei", 1 << 60, 0},
}

// ParseRate reads a bandwidth in the units of tc(8), in any case, and returns bit/s: "50mbit",
// "1.5gbit", "64kibit". A bare number is bit/s. Decimal fractions are exact; a fraction of a bit is
// dropped. There are no signs, exponents or blanks. "10mbps" is an error, which suggests both
// possible meanings.
func ParseRate(s string) (uint64, error) {
	return parseQuantity(s, measure{units: rateUnits, names: "bit, kbit, mbit, gbit, tbit, kibit..tibit", hint: rateHint})
}

// FormatRate returns bitsPerSecond in the largest decimal unit that leaves no fraction. ParseRate
// reads it back exactly.
func FormatRate(bitsPerSecond uint64) string {
	return format(bitsPerSecond, rateUnits[1:6])
}

// ParseSize reads a size in the units of tc(8), in any case, and returns bytes: "50mb" and "50m"
// are 50 MiB. A bare number is bytes.
func ParseSize(s string) (uint64, error) {
	return parseQuantity(s, measure{units: sizeUnits, names: "b, k, kb, m, mb, g, gb, kbit, mbit, gbit", hint: sizeHint})
}

// FormatSize returns bytes in the largest unit that leaves no fraction. ParseSize reads it back
// exactly.
func FormatSize(bytes uint64) string {
	return format(bytes, []unit{{"b", 1, 0}, {"kb", 1 << 10, 0}, {"mb", 1 << 20, 0}, {"gb", 1 << 30, 0}})
}

// ParseDuration reads a time with one of the units us, ms and s: "2ms", "0.5s". It refuses a number
// without a unit, and drops fractions of a nanosecond.
func ParseDuration(s string) (time.Duration, error) {
	ns, err := parseQuantity(s, measure{units: timeUnits, names: "us, ms, s"})
	if err == nil && ns > 1<<63-1 {
		err = errors.New("the number is too large")
	}
	return time.Duration(ns), err
}

// percentUnits are the endings of a percentage, in millionths.
var percentUnits = []unit{{suffix: "%", num: 10_000}, {suffix: "", num: 10_000}}

// parsePercent reads a percentage, with or without its sign, and returns it in parts of 1: "5%" and
// "5" are 0.05. Decimal fractions are read to a millionth; there are no signs, exponents or blanks,
// and no value exceeds 100%.
func parsePercent(s string) (float64, error) {
	n, err := parseQuantity(s, measure{units: percentUnits, names: "%"})
	if err == nil && n > 1_000_000 {
		err = errors.New("must not be more than 100%")
	}
	return float64(n) / 1_000_000, err
}

// parseBandwidth reads a Kubernetes quantity of bit/s, as in the annotations
// kubernetes.io/ingress-bandwidth and egress-bandwidth.
func parseBandwidth(s string) (uint64, error) {
	// The decimal exponent of a quantity: "1e6". "1E" alone is the suffix exa.
	if i := strings.IndexAny(s, "eE"); i > 0 && i+1 < len(s) {
		exponent, err := strconv.ParseUint(strings.TrimPrefix(s[i+1:], "+"), 10, 8)
		if err == nil {
			if exponent > 18 {
				return 0, errors.New("the number is too large")
			}
			power := uint64(1)
			for range exponent {
				power *= 10
			}
			return parseQuantity(s[:i], measure{units: []unit{{"", power, 0}}, names: "none before an exponent"})
		}
	}
	return parseQuantity(s, measure{units: bandwidthUnits, exact: true, names: "a Kubernetes quantity of bits per second: k, M, G, T, P, Ki, Mi, Gi, Ti, Pi"})
}

// maxNumber limits the digits of a number; 2^64 has 20.
const maxNumber = 40

func parseQuantity(s string, m measure) (uint64, error) {
	number := s[:len(s)-len(strings.TrimLeft(s, "0123456789."))]
	suffix := s[len(number):]
	whole, fraction, dotted := strings.Cut(number, ".")
	switch {
	case strings.HasPrefix(s, "-"):
		return 0, errors.New("must not be negative")
	case s == "":
		return 0, errors.New("must not be empty")
	case whole == "" || dotted && fraction == "" || strings.Contains(fraction, "."):
		return 0, errors.New("must start with a decimal number")
	case len(number) > maxNumber:
		return 0, errors.New("the number has too many digits")
	}
	for _, u := range m.units {
		if !m.is(u, suffix) {
			continue
		}
		r, _ := new(big.Rat).SetString(number) // it has digits, and one point at most
		r.Mul(r, new(big.Rat).SetFrac(new(big.Int).SetUint64(u.num), new(big.Int).SetUint64(max(u.den, 1))))
		n := new(big.Int).Quo(r.Num(), r.Denom())
		if !n.IsUint64() {
			return 0, errors.New("the number is too large")
		}
		return n.Uint64(), nil
	}
	if suffix == "" {
		return 0, fmt.Errorf("needs a unit: %s", m.names)
	}
	closed := strings.Join(strings.Fields(suffix), "")
	for _, u := range m.units {
		if closed != "" && m.is(u, closed) {
			return 0, fmt.Errorf("unknown unit %s: write %s%s", quote(suffix), number, u.suffix)
		}
	}
	if m.hint != nil {
		if hint := m.hint(number, suffix); hint != "" {
			return 0, errors.New(hint)
		}
	}
	return 0, fmt.Errorf("unknown unit %s; units are %s", quote(suffix), m.names)
}

// is reports whether u has this suffix.
func (m measure) is(u unit, suffix string) bool {
	return u.suffix == suffix || !m.exact && strings.EqualFold(u.suffix, suffix)
}

func format(n uint64, ascending []unit) string {
	best := ascending[0]
	for _, u := range ascending {
		if n != 0 && n%u.num == 0 {
			best = u
		}
	}
	return strconv.FormatUint(n/best.num, 10) + best.suffix
}

// parseInteger reads a whole number between low and high, digits only.
func parseInteger(s string, low, high uint64) (uint64, error) {
	if strings.HasPrefix(s, "-") {
		return 0, errors.New("must not be negative")
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if errors.Is(err, strconv.ErrRange) || err == nil && (n < low || n > high) {
		return 0, fmt.Errorf("must be between %d and %d", low, high)
	}
	if err != nil || s[0] == '+' {
		return 0, errors.New("must be a whole number")
	}
	return n, nil
}

// of says whether a unit counts bits or bytes.
type of int

const (
	either of = iota // "10M", "10Mb", "10mbps": people mean both
	inBits
	inBytes
)

// scales are the prefixes of a unit, with their names.
var scales = []struct{ letters, name string }{
	{"ki", "kibi"}, {"mi", "mebi"}, {"gi", "gibi"}, {"ti", "tebi"},
	{"k", "kilo"}, {"m", "mega"}, {"g", "giga"}, {"t", "tera"}, {"", ""},
}

// foreign reads a unit that is used elsewhere: "Mbps", "MB/s", "Gi", "mbits". scale is in the letters
// of our units, and name is its common name.
func foreign(suffix string) (scale, name string, counts of, ok bool) {
	s := strings.ToLower(strings.Join(strings.Fields(suffix), ""))
	for _, per := range []string{"/sec", "/s", "psec", "ps"} {
		if rest, found := strings.CutSuffix(s, per); found {
			s = rest
			break
		}
	}
	for _, x := range scales {
		base, found := strings.CutPrefix(s, x.letters)
		if !found {
			continue
		}
		switch base {
		case "bit", "bits":
			return x.letters, x.name, inBits, true
		case "byte", "bytes":
			return x.letters, x.name, inBytes, true
		case "b":
			return x.letters, x.name, either, true
		case "":
			return x.letters, x.name, either, x.letters != ""
		}
	}
	return "", "", either, false
}

// rateHint suggests a replacement for an unknown unit of a rate.
func rateHint(number, suffix string) string {
	if strings.TrimSpace(suffix) == "%" {
		return "a share of the link is no rate: write one, like 50mbit; net.weight divides by shares"
	}
	scale, name, counts, ok := foreign(suffix)
	if !ok {
		return ""
	}
	asBits, asBytes := number+scale+"bit", eightfold(number)+scale+"bit"
	switch counts {
	case inBits:
		return fmt.Sprintf("unknown unit %s: write %s", quote(suffix), asBits)
	case inBytes:
		return fmt.Sprintf("unknown unit %s: write %s", quote(suffix), asBytes)
	}
	return fmt.Sprintf("%s may be bits or bytes: write %s, or %s for %s %sbyte%s a second", quote(suffix), asBits, asBytes, number, name, plural(number))
}

// sizeHint suggests a replacement for an unknown unit of a size. There, prefixes are powers of 1024
// with or without an i.
func sizeHint(number, suffix string) string {
	scale, name, counts, ok := foreign(suffix)
	scale, binary := strings.CutSuffix(scale, "i")
	if !ok || scale == "t" {
		return ""
	}
	asBits, asBytes := number+scale+"bit", number+scale+"b"
	switch {
	case counts == inBits && scale != "":
		return fmt.Sprintf("unknown unit %s: write %s", quote(suffix), asBits)
	case counts == inBytes, counts == either && binary:
		return fmt.Sprintf("unknown unit %s: write %s", quote(suffix), asBytes)
	case counts == either && scale != "":
		return fmt.Sprintf("%s may be bits or bytes: write %s, or %s for %s %sbit%s a second", quote(suffix), asBytes, asBits, number, name, plural(number))
	}
	return ""
}

// eightfold multiplies a decimal number by eight.
func eightfold(number string) string {
	r, _ := new(big.Rat).SetString(number) // parseQuantity has read it
	s := r.Mul(r, big.NewRat(8, 1)).FloatString(len(number))
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
}

func plural(number string) string {
	if number == "1" {
		return ""
	}
	return "s"
}
