package policy

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"pgregory.net/rapid"
)

func TestParseRate(t *testing.T) {
	for s, want := range map[string]uint64{
		"0": 0, "1": 1, "1000bit": 1000, "50mbit": 50e6, "50MBit": 50e6, "1.5gbit": 1.5e9, "0.1kbit": 100, "1tbit": 1e12,
		"1kibit": 1024, "1mibit": 1 << 20, "1gibit": 1 << 30, "1tibit": 1 << 40,
		"1.9bit": 1, "0.3kbit": 300, "18446744073709551615": 1<<64 - 1,
	} {
		testkit.Gives(t, "ParseRate("+s+")", want)(ParseRate(s))
	}
	for s, want := range map[string]string{
		"": "must not be empty", "-1": "must not be negative", "mbit": "must start with a decimal number", ".5mbit": "must start with a decimal number",
		"5.mbit": "must start with a decimal number", "1.2.3": "must start with a decimal number", "+1": "must start with a decimal number",
		"18446744073709551616": "the number is too large", "20000000tbit": "the number is too large",
		strings.Repeat("9", 41): "the number has too many digits", "0x10": `unknown unit "x10"`, "1 mbit": `unknown unit " mbit"`,
		"1\x00": `unknown unit "\x00"`, "5\x1b[31m": `unknown unit "\x1b[31m"`, "1e6": `unknown unit "e6"`, "inf": "must start with a decimal number",
	} {
		got, err := ParseRate(s)
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("ParseRate(%q) = %d, %v, want %q", s, got, err, want)
		}
	}
}

// TestUnitHints: a foreign unit, and one with two readings, is an error that says what to write.
func TestUnitHints(t *testing.T) {
	rate := func(s string) error { _, err := ParseRate(s); return err }
	size := func(s string) error { _, err := ParseSize(s); return err }
	length := func(s string) error { _, err := ParseDuration(s); return err }
	percent := func(s string) error { _, err := parsePercent(s); return err }
	for _, c := range []struct {
		parse       func(string) error
		value, want string
	}{
		{rate, "10mbps", `"mbps" may be bits or bytes: write 10mbit, or 80mbit for 10 megabytes a second`},
		{rate, "10Mbps", `"Mbps" may be bits or bytes: write 10mbit, or 80mbit for 10 megabytes a second`},
		{rate, "1Gbps", `"Gbps" may be bits or bytes: write 1gbit, or 8gbit for 1 gigabyte a second`},
		{rate, "1.5gbps", `"gbps" may be bits or bytes: write 1.5gbit, or 12gbit for 1.5 gigabytes a second`},
		{rate, "0.3kbps", `"kbps" may be bits or bytes: write 0.3kbit, or 2.4kbit for 0.3 kilobytes a second`},
		{rate, "800bps", `"bps" may be bits or bytes: write 800bit, or 6400bit for 800 bytes a second`},
		{rate, "64kibps", `"kibps" may be bits or bytes: write 64kibit, or 512kibit for 64 kibibytes a second`},
		{rate, "10M", `"M" may be bits or bytes: write 10mbit, or 80mbit for 10 megabytes a second`},
		{rate, "1Gi", `"Gi" may be bits or bytes: write 1gibit, or 8gibit for 1 gibibyte a second`},
		{rate, "10 MB/s", `" MB/s" may be bits or bytes: write 10mbit, or 80mbit for 10 megabytes a second`},
		{rate, "10Mb", `"Mb" may be bits or bytes: write 10mbit, or 80mbit for 10 megabytes a second`},
		{rate, "10 mbit", `unknown unit " mbit": write 10mbit`},
		{rate, "10Mbit/s", `unknown unit "Mbit/s": write 10mbit`},
		{rate, "10mbits", `unknown unit "mbits": write 10mbit`},
		{rate, "10 megabit", `unknown unit " megabit"; units are bit, kbit, mbit, gbit, tbit, kibit..tibit`},
		{rate, "10Mbyte/s", `unknown unit "Mbyte/s": write 80mbit`},
		{rate, "50%", `a share of the link is no rate: write one, like 50mbit; net.weight divides by shares`},
		{rate, "10furlongs", `unknown unit "furlongs"; units are bit, kbit, mbit, gbit, tbit, kibit..tibit`},
		{size, "10mbps", `"mbps" may be bits or bytes: write 10mb, or 10mbit for 10 megabits a second`},
		{size, "10 MB/s", `" MB/s" may be bits or bytes: write 10mb, or 10mbit for 10 megabits a second`},
		{size, "50MiB", `unknown unit "MiB": write 50mb`},
		{size, "50MiB/s", `unknown unit "MiB/s": write 50mb`},
		{size, "50 mb", `unknown unit " mb": write 50mb`},
		{size, "50%", `unknown unit "%"; units are b, k, kb, m, mb, g, gb, kbit, mbit, gbit`},
		{size, "1tb", `unknown unit "tb"; units are b, k, kb, m, mb, g, gb, kbit, mbit, gbit`},
		{length, "2 ms", `unknown unit " ms": write 2ms`},
		{length, "2", `needs a unit: us, ms, s`},
		{percent, "5 %", `unknown unit " %": write 5%`},
	} {
		testkit.Same(t, c.value, c.want, fmt.Sprint(c.parse(c.value)))
	}
}

// TestUnderstood: a value is said back in the units that are common elsewhere.
func TestUnderstood(t *testing.T) {
	for _, c := range [][3]string{
		{"net.ceil", "20mbit", "20.0 Mbit/s"},
		{"fairlead.net.ingress.rate", "1.5gbit", "1.5 Gbit/s"},
		{"net.rate", "1000000", "1.0 Mbit/s"},
		{"net.ceil", "64kibit", "65.5 kbit/s"},
		{"net.ceil", "1Gi", "1.1 Gbit/s"}, // of Kubernetes' annotation
		{"io.max", "/dev/vdb rbps=50mb wiops=500; /dev/vdc wbps=8mbit", "/dev/vdb rbps 52.4 MB/s; /dev/vdc wbps 1.0 MB/s"},
		{"io.reserve", "/dev/vdb riops=2000", ""},
		{"netcpu.reserve", "5", "5%"},
		{"netcpu.steal", "5%", ""},
		{"netcpu", "auto", ""},
		{"latency", "True", "on"},
		{"io.yield", "False", "off"},
		{"net.weight", "2", ""},
		{"net.latency", "0.5ms", "500µs"},
		{"net.latency", "2ms", ""},
		{"io.realtime", "auto", ""},
		{"net.ceil", "10mbps", ""}, // no value
		{"no.key", "1", ""},
	} {
		testkit.Same(t, fmt.Sprintf("Understood(%q, %q)", c[0], c[1]), c[2], Understood(c[0], c[1]))
	}
}

func TestParseSizeAndDuration(t *testing.T) {
	for s, want := range map[string]uint64{"1": 1, "1b": 1, "2k": 2048, "2kb": 2048, "50mb": 50 << 20, "50M": 50 << 20, "0.5g": 1 << 29, "1gb": 1 << 30,
		"8kbit": 1024, "8mbit": 1 << 20, "8gbit": 1 << 30} {
		testkit.Gives(t, "ParseSize("+s+")", want)(ParseSize(s))
	}
	for s, want := range map[string]time.Duration{"2ms": 2 * time.Millisecond, "10us": 10 * time.Microsecond, "0.5s": 500 * time.Millisecond, "1.5US": 1500} {
		testkit.Gives(t, "ParseDuration("+s+")", want)(ParseDuration(s))
	}
	for _, s := range []string{"2", "1h", "-1s", "", "18446744073s", "9223372037s"} {
		testkit.Fails(t, "ParseDuration("+s+")", testkit.Err(ParseDuration(s)))
	}
}

func TestParsePercent(t *testing.T) {
	for s, want := range map[string]float64{"0%": 0, "5%": 0.05, "5": 0.05, "12.5%": 0.125, "100%": 1, "0.0001%": 0.000001} {
		testkit.Gives(t, "parsePercent("+s+")", want)(parsePercent(s))
	}
	for _, s := range []string{"", "%", "-5%", "+5%", "five", "5 %", "5%%", "1e1%", "100.001%", "101", "NaN", "inf", ".5%", "99999999999999999999999%"} {
		testkit.Fails(t, "parsePercent("+s+")", testkit.Err(parsePercent(s)))
	}
}

func TestParseBandwidth(t *testing.T) {
	for s, want := range map[string]uint64{"10M": 10e6, "1Gi": 1 << 30, "100k": 1e5, "1.5G": 1.5e9, "1000000": 1e6, "1e6": 1e6, "1E3": 1e3, "1E": 1e18, "1500000m": 1500, "1P": 1e15, "2.5e+9": 2.5e9} {
		testkit.Gives(t, "parseBandwidth("+s+")", want)(parseBandwidth(s))
	}
	for _, s := range []string{"", "10mbit", "10K", "-1M", "1e19", "1e", "20E", "1e6M"} {
		testkit.Fails(t, "parseBandwidth("+s+")", testkit.Err(parseBandwidth(s)))
	}
}

func TestFormatRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Uint64().Draw(t, "n") * rapid.SampledFrom([]uint64{1, 1000, 1e6, 1e9, 1024}).Draw(t, "unit")
		if got, err := ParseRate(FormatRate(n)); err != nil || got != n {
			t.Fatalf("ParseRate(FormatRate(%d) = %q) = %d, %v", n, FormatRate(n), got, err)
		}
		if got, err := ParseSize(FormatSize(n)); err != nil || got != n {
			t.Fatalf("ParseSize(FormatSize(%d) = %q) = %d, %v", n, FormatSize(n), got, err)
		}
	})
	for n, want := range map[uint64]string{0: "0bit", 1: "1bit", 1000: "1kbit", 1500: "1500bit", 50e6: "50mbit", 1e15: "1000tbit"} {
		testkit.Same(t, fmt.Sprintf("FormatRate(%d)", n), want, FormatRate(n))
	}
}

// FuzzParseRate: a parsed rate can be written and read again unchanged, a larger number is never a
// smaller rate, and errors are printable.
func FuzzParseRate(f *testing.F) {
	testkit.Seeds(f, "50mbit", "1.5gbit", "10mbps", "10 MB/s", "1.5gi", "50%", "64kibit", "", "-1", "1e9", "0.0000001tbit", "18446744073709551616", "18446744tbit", "5\x1b[31m", "٣mbit", "1K")
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseRate(s)
		if err != nil {
			if err.Error() != printable(err.Error()) && !strings.Contains(err.Error(), `\`) || len(err.Error()) > 400 {
				t.Fatalf("ParseRate(%q): error %q", s, err)
			}
			return
		}
		if again, err := ParseRate(FormatRate(n)); err != nil || again != n {
			t.Fatalf("ParseRate(%q) = %d, written %q, read %d, %v", s, n, FormatRate(n), again, err)
		}
		if more, err := ParseRate("1" + s); err == nil && more < n {
			t.Fatalf("ParseRate(%q) = %d, but ParseRate(%q) = %d", s, n, "1"+s, more)
		}
	})
}
