package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// mapMemory returns the bytes that the BPF maps that a process has open occupy, each map counted
// once. They are in no process's resident memory. dir is the process's directory in proc.
func mapMemory(dir string) (sum float64, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "fdinfo", "*"))
	if err != nil {
		return 0, err
	}
	seen := make(map[string]bool)
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			continue // closed meanwhile
		}
		fields := make(map[string]string)
		for line := range strings.Lines(string(data)) {
			name, value, _ := strings.Cut(line, ":")
			fields[name] = strings.TrimSpace(value)
		}
		id := fields["map_id"]
		if fields["map_type"] == "" || seen[id] {
			continue // not a map, or a map that is open twice
		}
		seen[id] = true
		bytes, err := strconv.ParseFloat(fields["memlock"], 64)
		if err != nil {
			return 0, fmt.Errorf("read %s: %w", file, err)
		}
		sum += bytes
	}
	return sum, nil
}
