package rules

import (
	"os"
	"regexp"
	"strconv"
	"testing"
)

// TestMemoryLimit fails if Go's memory limit in the unit leaves less than a quarter of MemoryMax to
// memory that Go does not count. Without the limit the kernel kills an agent only because its
// garbage has not been collected yet.
func TestMemoryLimit(t *testing.T) {
	data, err := os.ReadFile("../../packaging/fairlead.service")
	must(t, err)
	size := func(line string) int {
		m := regexp.MustCompile(`(?m)^` + line + `$`).FindSubmatch(data)
		if m == nil {
			t.Fatalf("the unit has no line like %s", line)
		}
		n, err := strconv.Atoi(string(m[1]))
		must(t, err)
		return n
	}
	most, limit := size(`MemoryMax=(\d+)G`)<<10, size(`Environment=GOMEMLIMIT=(\d+)MiB`)
	if limit > most*3/4 {
		t.Errorf("GOMEMLIMIT is %d MiB of %d", limit, most)
	}
}

// TestUnitOpens fails if the unit keeps the agent from openat2(2), by which it opens control groups,
// sysctls and devices. systemd answers ENOSYS to it under these two settings, since a filter cannot
// look at its flags (seccomp_restrict_sxid of systemd's seccomp-util.c).
func TestUnitOpens(t *testing.T) {
	data, err := os.ReadFile("../../packaging/fairlead.service")
	must(t, err)
	if line := regexp.MustCompile(`(?m)^(RestrictSUIDSGID|DynamicUser)=(yes|true|on|1)$`).Find(data); line != nil {
		t.Errorf("the unit has the line %s", line)
	}
}
