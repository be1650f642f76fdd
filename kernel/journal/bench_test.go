package journal

import (
	"fmt"
	"testing"
)

// BenchmarkRestoreOne finds the entries of one container among those of a thousand, as each Apply
// and Remove of a feature does.
func BenchmarkRestoreOne(b *testing.B) {
	board := newBoard()
	j, err := openBoot(b.TempDir(), "", boot)
	must(b, err)
	defer j.Close()
	for c := range uint64(1000) {
		for k := range 20 {
			name := fmt.Sprintf("%d/%d", c, k)
			board.set(name, "0")
			must(b, j.Turn(board.knob(name), "1", Owner{Feature: "bench", Container: c + 1}))
		}
	}
	for b.Loop() {
		if _, err := j.Restore(board.open, func(e Entry) bool { return e.Owner.Container == 1001 }); err != nil {
			b.Fatal(err)
		}
	}
}
