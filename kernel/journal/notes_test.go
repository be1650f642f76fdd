package journal

import (
	"testing"
	"time"
)

// A panic that passes through the Journal breaks it, so that nobody goes on with it.
func TestPanicBreaks(t *testing.T) {
	torn := func(Entry) bool { panic("torn") }
	for name, call := range map[string]func(*Journal, *board){
		"extend":  func(j *Journal, _ *board) { j.Extend(torn, time.Time{}) },
		"forget":  func(j *Journal, _ *board) { j.Forget(torn) },
		"rename":  func(j *Journal, _ *board) { j.Rename(torn, func(e Entry) Entry { return e }) },
		"restore": func(j *Journal, b *board) { j.Restore(b.open, torn) },
		"turn":    func(j *Journal, _ *board) { j.Turn(tornKnob{}, "x", Owner{Feature: "f"}) },
	} {
		b := newBoard("a", "1")
		j := open(t, t.TempDir())
		turn(t, j, b.knob("a"), "2")
		if j.Entries(); j.Broken() {
			t.Errorf("%s: it is broken before", name)
		}
		func() {
			defer func() {
				if p := recover(); p != "torn" || !j.Broken() {
					t.Errorf("%s: it panics with %v, and is broken: %v", name, p, j.Broken())
				}
			}()
			call(j, b)
		}()
	}
}

// tornKnob panics when it is read.
type tornKnob struct{}

func (tornKnob) Ref() Ref              { return Ref{Kind: "mem", Object: "torn"} }
func (tornKnob) Read() (string, error) { panic("torn") }
func (tornKnob) Write(string) error    { return nil }
