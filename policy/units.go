package policy

import (
	"errors"
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"time"
)

// unit is a suffix and what one of it amounts to.
type unit struct {
	suffix string
	num    uint64 // in base units
	den    uint64 // divides num; 0 is 1
}

// rateUnits are those of tc(8), in bit/s. In tc "bps" is bytes per second.
var rateUnits = []unit{
	{"", 1, 0}, {"bit", 1, 0},
	{"kbit", 1e3, 0}, {"mbit", 1e6, 0}, {"gbit", 1e9, 0}, {"tbit", 1e12, 0},
	{"kibit", 1 << 10, 0}, {"mibit", 1 << 20, 0}, {"gibit", 1 << 30, 0}, {"tibit", 1 << 40, 0},
	{"bps", 8, 0},
	{"kbps", 8e3, 0}, {"mbps", 8e6, 0}, {"gbps", 8e9, 0}, {"tbps", 8e12, 0},
	{"kibps", 8 << 10, 0}, {"mibps", 8 << 20, 0}, {"gibps", 8 << 30, 0}, {"tibps", 8 << 40, 0},
}

// sizeUnits are those of tc(8), in bytes: k, m and g are powers of 1024.
var sizeUnits = []unit{
	{"", 1, 0}, {"b", 1, 0},
	{"k", 1 << 10, 0}, {"kb", 1 << 10, 0}, {"m", 1 << 20, 0}, {"mb", 1 << 20, 0}, {"g", 1 << 30, 0}, {"gb", 1 << 30, 0},
	{"kbit", 1 << 10, 8}, {"mbit", 1 << 20, 8}, {"gbit", 1 << 30, 8},
}

var timeUnits = []unit{{"us", 1e3, 0}, {"ms", 1e6, 0}, {"s", 1e9, 0}}

// bandwidthUnits are the suffixes of a Kubernetes quantity, in bit/s. They are
// case-sensitive.
var bandwidthUnits = []unit{
	{"m", 1, 1000}, {"", 1, 0}, {"k", 1e3, 0}, {"M", 1e6, 0}, {"G", 1e9, 0}, {"T", 1e12, 0}, {"P", 1e15, 0}, {"E", 1e18, 0},
	{"Ki", 1 << 10, 0}, {"Mi", 1 << 20, 0}, {"Gi", 1 << 30, 0}, {"Ti", 1 << 40, 0}, {"Pi", 1 << 50, 0}, {"Ei", 1 << 60, 0},
}

// ParseRate reads a bandwidth in the units of tc(8), whatever their case, and
// gives bit/s: "50mbit", "1.5gbit", "64kibit", "10mbps" (which is 80 Mbit/s:
// bps are bytes). A bare number is bit/s. Decimal fractions are exact; a
// fraction of a bit is dropped. There are no signs, exponents or blanks.
func ParseRate(s string) (uint64, error) {
	return parseQuantity(strings.ToLower(s), rateUnits, "bit, kbit, mbit, gbit, tbit, kibit..tibit, bps, kbps..tbps (bytes per second)")
}

// FormatRate gives bitsPerSecond in the largest decimal unit that leaves no
// fraction. ParseRate reads it back exactly.
func FormatRate(bitsPerSecond uint64) string {
	return format(bitsPerSecond, rateUnits[1:6])
}

// ParseSize reads a size in the units of tc(8), whatever their case, and gives
// bytes: "50mb" and "50m" are 50 MiB. A bare number is bytes.
func ParseSize(s string) (uint64, error) {
	return parseQuantity(strings.ToLower(s), sizeUnits, "b, k, kb, m, mb, g, gb, kbit, mbit, gbit")
}

// FormatSize gives bytes in the largest unit that leaves no fraction.
// ParseSize reads it back exactly.
func FormatSize(bytes uint64) string {
	return format(bytes, []unit{{"b", 1, 0}, {"kb", 1 << 10, 0}, {"mb", 1 << 20, 0}, {"gb", 1 << 30, 0}})
}

// ParseDuration reads a time with one of the units us, ms and s: "2ms",
// "0.5s". A number without a unit is refused. What is less than a nanosecond
// is dropped.
func ParseDuration(s string) (time.Duration, error) {
	ns, err := parseQuantity(strings.ToLower(s), timeUnits, "us, ms, s")
	if err == nil && ns > 1<<63-1 {
		err = errors.New("the number is too large")
	}
	return time.Duration(ns), err
}

// percentUnits are what a percentage may end in, in millionths.
var percentUnits = []unit{{suffix: "%", num: 10_000}, {suffix: "", num: 10_000}}

// ParsePercent reads a percentage, with or without its sign, and gives it in
// parts of 1: "5%" and "5" are 0.05. Decimal fractions are read to a millionth;
// there are no signs, exponents or blanks, and nothing is above 100%.
func ParsePercent(s string) (float64, error) {
	n, err := parseQuantity(s, percentUnits, "%")
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
			return parseQuantity(s[:i], []unit{{"", power, 0}}, "none before an exponent")
		}
	}
	return parseQuantity(s, bandwidthUnits, "a Kubernetes quantity of bits per second: k, M, G, T, P, Ki, Mi, Gi, Ti, Pi")
}

// maxNumber bounds the digits of a number; 2^64 has 20.
const maxNumber = 40

func parseQuantity(s string, units []unit, names string) (uint64, error) {
	digits := 0
	for digits < len(s) && (s[digits] >= '0' && s[digits] <= '9' || s[digits] == '.') {
		digits++
	}
	number, suffix := s[:digits], s[digits:]
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
	for _, u := range units {
		if u.suffix != suffix {
			continue
		}
		r, ok := new(big.Rat).SetString(number)
		if !ok {
			return 0, errors.New("must start with a decimal number")
		}
		r.Mul(r, new(big.Rat).SetFrac(new(big.Int).SetUint64(u.num), new(big.Int).SetUint64(max(u.den, 1))))
		n := new(big.Int).Quo(r.Num(), r.Denom())
		if !n.IsUint64() {
			return 0, errors.New("the number is too large")
		}
		return n.Uint64(), nil
	}
	if suffix == "" {
		return 0, fmt.Errorf("needs a unit: %s", names)
	}
	return 0, fmt.Errorf("unknown unit %s; units are %s", quote(suffix), names)
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
