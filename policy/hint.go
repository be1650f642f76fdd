package policy

import (
	"fmt"
	"math/big"
	"strings"
)

// of is what the base of a unit counts.
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

// foreign reads a unit in use elsewhere: "Mbps", "MB/s", "Gi", "mbits". The scale is in the letters
// of ours, and name is its common name.
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

// sizeHint suggests a replacement for an unknown unit of a size, where powers are those of 1024
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
