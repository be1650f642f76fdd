package bench

import (
	"os"
	"path/filepath"
	"testing"
)

func TestMapMemory(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "fdinfo"), 0o755); err != nil {
		t.Fatal(err)
	}
	const one = "pos:\t0\nmap_type:\t9\nmemlock:\t4096\nmap_id:\t7\n"
	for name, text := range map[string]string{
		"0": "pos:\t0\nflags:\t02\n", "3": one, "4": one,
		"5": "map_type:\t1\nmemlock:\t1000\nmap_id:\t8\n", "6": "prog_type:\t3\nmemlock:\t9999\nprog_id:\t7\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, "fdinfo", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := mapMemory(dir); err != nil || got != 5096 {
		t.Errorf("got %v, %v, want 5096", got, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "fdinfo", "9"), []byte("map_type:\t1\nmemlock:\tmuch\nmap_id:\t9\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := mapMemory(dir); err == nil {
		t.Errorf("a bad number gives %v", got)
	}
}
