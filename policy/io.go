package policy

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
)

// Limits of one container's block devices.
const (
	maxDevices    = 16
	maxIOPS       = 100_000_000
	minIOByteRate = 1 << 10 // 1kb/s
	maxIOByteRate = 1 << 40 // 1024gb/s
)

// ioFigures returns the names of a device's figures.
func ioFigures() []string { return []string{"rbps", "wbps", "riops", "wiops"} }

// reserved and capped return the fields of io.reserve and io.max, in the order of their names.
func reserved(io *IO) []*uint64 { return io.Reserved.each() }
func capped(io *IO) []*uint64   { return io.Max.each() }
func (f *Figures) each() []*uint64 {
	return []*uint64{&f.ReadBytes, &f.WriteBytes, &f.ReadIOPS, &f.WriteIOPS}
}

// FormatReserve formats reservations in the form of the key io.reserve; "" is none.
func FormatReserve(ios []IO) string { return formatDevices(ios, reserved, figureText) }

// FormatMax formats caps in the form of the key io.max; "" is none.
func FormatMax(ios []IO) string { return formatDevices(ios, capped, figureText) }

func figureText(name string, n uint64) string { return fmt.Sprintf(" %s=%d", name, n) }

func formatDevices(ios []IO, figures func(*IO) []*uint64, format func(name string, n uint64) string) string {
	var devices []string
	for _, io := range ios {
		text := io.Device
		for i, n := range figures(&io) {
			if *n != 0 {
				text += format(ioFigures()[i], *n)
			}
		}
		if text != io.Device {
			devices = append(devices, text)
		}
	}
	return strings.Join(devices, "; ")
}

// parseDevices reads a value such as "/dev/vdb riops=2000 wbps=5mb; /dev/vdc riops=100". figures
// returns the fields to set.
func parseDevices(figures func(*IO) []*uint64) func(string) (setter, error) {
	return func(value string) (setter, error) {
		var ios []IO
		for part := range strings.SplitSeq(value, ";") {
			io, err := parseDevice(part, figures)
			if err != nil {
				return nil, err
			}
			if slices.ContainsFunc(ios, func(o IO) bool { return o.Device == io.Device }) {
				return nil, fmt.Errorf("%s is given twice", io.Device)
			}
			if ios = append(ios, io); len(ios) > maxDevices {
				return nil, fmt.Errorf("more than %d devices", maxDevices)
			}
		}
		return func(s *Settings) {
			s.IO = slices.Clone(s.IO)
			for i := range s.IO { // earlier values of these fields
				for _, n := range figures(&s.IO[i]) {
					*n = 0
				}
			}
			s.IO = slices.DeleteFunc(s.IO, func(io IO) bool { return io == IO{Device: io.Device} })
			for _, io := range ios {
				s.addIO(io)
			}
		}, nil
	}
}

func parseDevice(part string, figures func(*IO) []*uint64) (IO, error) {
	known := strings.Join(ioFigures(), ", ")
	words := strings.FieldsFunc(part, func(r rune) bool { return r == ' ' || r == '\t' })
	if len(words) == 0 {
		return IO{}, errors.New(`must be a device and figures, like "/dev/vdb riops=2000"`)
	}
	io := IO{Device: words[0]}
	if err := CheckDisk(io.Device); err != nil {
		return IO{}, err
	}
	if len(words) == 1 {
		return IO{}, fmt.Errorf("%s has no figures; known are %s", io.Device, known)
	}
	seen := map[string]bool{}
	for _, w := range words[1:] {
		name, figure, ok := strings.Cut(w, "=")
		if !ok {
			return IO{}, fmt.Errorf("%s is not of the form name=number, without blanks", quote(w))
		}
		i := slices.Index(ioFigures(), name)
		if i < 0 {
			return IO{}, fmt.Errorf("unknown figure %s; known are %s", quote(name), known)
		}
		if seen[name] {
			return IO{}, fmt.Errorf("%s is given twice for %s", name, io.Device)
		}
		seen[name] = true
		n, err := parseFigure(name, figure)
		if err != nil {
			return IO{}, fmt.Errorf("%s=%s: %w", name, quote(figure), err)
		}
		*figures(&io)[i] = n
	}
	return io, nil
}

func parseFigure(name, figure string) (uint64, error) {
	if strings.HasSuffix(name, "iops") {
		return parseInteger(figure, 1, maxIOPS)
	}
	n, err := ParseSize(figure)
	if err == nil && (n < minIOByteRate || n > maxIOByteRate) {
		err = fmt.Errorf("is not between %s and %s per second", FormatSize(minIOByteRate), FormatSize(maxIOByteRate))
	}
	return n, err
}

// CheckDisk returns an error unless d is a path that io.reserve accepts.
func CheckDisk(d string) error {
	odd := strings.ContainsFunc(d, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`"'\=*?`, r) })
	if !strings.HasPrefix(d, "/dev/") || path.Clean(d) != d || odd || len(d) > 128 {
		return fmt.Errorf("%s is not a device: must be a plain path below /dev", quote(d))
	}
	return nil
}

// addIO joins io into the entry of its device. s.IO stays sorted by device.
func (s *Settings) addIO(io IO) {
	i, found := slices.BinarySearchFunc(s.IO, io.Device, func(o IO, d string) int { return cmp.Compare(o.Device, d) })
	if !found {
		s.IO = slices.Insert(s.IO, i, io)
		return
	}
	for _, figures := range []func(*IO) []*uint64{reserved, capped} {
		for f, n := range figures(&io) {
			*figures(&s.IO[i])[f] += *n
		}
	}
}
