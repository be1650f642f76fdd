package rules

import (
	"os"
	"regexp"
	"strconv"
	"strings"
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

// TestRestoreConfined fails if the unit that restores may do what the agent's may not.
func TestRestoreConfined(t *testing.T) {
	agent, err := os.ReadFile("../../packaging/fairlead.service")
	must(t, err)
	restore, err := os.ReadFile("../../packaging/fairlead-restore.service")
	must(t, err)
	bound := regexp.MustCompile(`(?m)^(Capability|NoNew|Restrict|Device|Protect|Private|Read|NoExec|Exec|Lock|Memory|System|UMask)\w+=[^/\n].*$`)
	for _, line := range bound.FindAllString(string(agent), -1) {
		if !strings.HasPrefix(line, "MemoryMax=") && !strings.Contains(string(restore), "\n"+line+"\n") {
			t.Errorf("fairlead-restore.service lacks %s", line)
		}
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
