package decide

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestShare(t *testing.T) {
	c := Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 10_000, WriteIOPS: 5_000, ReadBytes: 400 << 20}}
	for _, x := range []struct {
		f    api.BlockIOFigures
		want float64
	}{
		{api.BlockIOFigures{}, 0},
		{api.BlockIOFigures{ReadIOPS: 1000}, 0.1},
		{api.BlockIOFigures{WriteIOPS: 1000}, 0.2},
		{api.BlockIOFigures{ReadIOPS: 1000, WriteIOPS: 1000}, 0.3},
		{api.BlockIOFigures{WriteIOPS: 1000, WriteBytes: 1 << 30}, 0.2}, // the capacity in bytes is unknown
		// 100 MiB/s in 800 requests of 128 KiB: a quarter for the bytes, and 800 bases of 1/10000
		// less 4 KiB's part.
		{api.BlockIOFigures{ReadBytes: 100 << 20}, 0.25 + 800*(1e-4-1.0/102400)},
		{api.BlockIOFigures{ReadBytes: 100 << 20, ReadIOPS: 800}, 0.25 + 800*(1e-4-1.0/102400)},
	} {
		if got, _, _ := c.Share(x.f); math.Abs(got-x.want) > 1e-12 {
			t.Errorf("%+v: share %v, want %v", x.f, got, x.want)
		}
	}
}

func TestAdmit(t *testing.T) {
	c := Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 1000, WriteIOPS: 500}, Headroom: 0.1}
	holders := []Holder{{1, "a", api.BlockIOFigures{ReadIOPS: 100}}, {2, "b", api.BlockIOFigures{ReadIOPS: 300}}}
	for _, x := range []struct {
		c      Capacity
		others []Holder
		want   api.BlockIOFigures
		says   string // "": admitted
	}{
		{c, nil, api.BlockIOFigures{ReadIOPS: 900}, ""},
		{c, nil, api.BlockIOFigures{ReadIOPS: 901}, "/dev/x has 90.0% of its capacity left (900 read or 450 write operations per second), and 90.1% are asked for"},
		{c, holders, api.BlockIOFigures{ReadIOPS: 500}, ""},
		{c, holders, api.BlockIOFigures{ReadIOPS: 400, WriteIOPS: 50}, ""},
		{c, holders, api.BlockIOFigures{ReadIOPS: 400, WriteIOPS: 51}, `has 50.0% of its capacity left (500 read or 250 write operations per second), and 50.2% are asked for; "b" (2) holds 30.0%; "a" (1) holds 10.0%`},
		{Capacity{}, holders, api.BlockIOFigures{ReadIOPS: 1 << 20, WriteBytes: 1}, ""}, // the capacity is unknown
		{c, nil, api.BlockIOFigures{ReadBytes: 4096}, "in bytes per second is not known"},
	} {
		err := Admit("/dev/x", x.c, x.others, x.want)
		testkit.Says(t, fmt.Sprintf("%+v beside %d", x.want, len(x.others)), err, x.says)
	}
}

// A reservation of a disk of unknown capacity is admitted. Its text depends on what the disk was seen
// to do.
func TestAdmission(t *testing.T) {
	short := Limit{Did: reads(700), Depth: 9.26, Taken: second(1)}
	for _, x := range []struct {
		name     string
		c        Capacity
		own, all api.BlockIOFigures
		limit    Limit
		how      string
		says     []string // nil: nothing
	}{
		{"never used", Capacity{}, reads(500), reads(1000), Limit{}, AdmissionUnverified, []string{"1000 reads a second are reserved", "nothing yet", "`fairlead io calibrate /dev/vdb --scratch DIR`"}},
		{"seen less", Capacity{Seen: reads(900)}, reads(500), reads(1000), Limit{}, AdmissionUnverified, []string{"at most 900 reads a second at once"}},
		{"seen as much", Capacity{Seen: reads(1000)}, reads(500), reads(1000), Limit{}, AdmissionSeen, []string{"as much", "calibrate"}},
		{"seen in one direction only", Capacity{Seen: reads(1000)}, reads(1), api.BlockIOFigures{ReadIOPS: 1, WriteIOPS: 1}, Limit{}, AdmissionUnverified, nil},
		{"short while nobody was in the way", Capacity{Seen: reads(1000)}, reads(1000), reads(1000), short, AdmissionUnverified, []string{"nobody was in the way", "700 reads", "9.3 requests"}},
		{"known", Capacity{BlockIOFigures: reads(1000)}, reads(500), reads(1000), short, AdmissionVerified, []string{}},
		{"known to be less", Capacity{BlockIOFigures: reads(1000), Headroom: 0.1}, reads(500), reads(1000), Limit{}, AdmissionExceeded, []string{"100% of what /dev/vdb", "90% can be"}},
		{"known, in one request at a time", Capacity{BlockIOFigures: reads(1000), Depth1: reads(500)}, reads(500), reads(1000), Limit{}, AdmissionVerified, []string{}},
		{"known, in more than that", Capacity{BlockIOFigures: reads(1000), Depth1: reads(500)}, reads(501), reads(501), Limit{}, AdmissionVerified, []string{"at least 2 requests", "500 reads"}},
	} {
		a := x.c.Admission("/dev/vdb", x.own, x.all, x.limit)
		if a.How != x.how || x.says != nil && len(x.says) == 0 && a.Text != "" {
			t.Errorf("%s: %+v, want %s %q", x.name, a, x.how, x.says)
		}
		for _, w := range x.says {
			if !strings.Contains(a.Text, w) {
				t.Errorf("%s: %q, want %q", x.name, a.Text, w)
			}
		}
	}
}

// Without a known capacity, I/O is compared with what was seen or is reserved, never with zero.
func TestOrAssumed(t *testing.T) {
	seen := api.BlockIOFigures{ReadIOPS: 2000, ReadBytes: 100 << 20}
	c := Capacity{Seen: seen}.OrAssumed(api.BlockIOFigures{ReadIOPS: 500, WriteBytes: 1 << 30})
	if c.Known() || c.ReadIOPS != 2000 || c.ReadBytes != 100<<20 || c.WriteBytes != 1<<30 || c.WriteIOPS != 8192 {
		t.Errorf("assumed %+v", c)
	}
	testkit.Check(t, c.Check())
	testkit.Is(t, "of nothing", (Capacity{}).OrAssumed(api.BlockIOFigures{}).Check(), nil)
	known := Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 1, WriteIOPS: 1}, Seen: seen}
	if got := known.OrAssumed(seen); got.BlockIOFigures != known.BlockIOFigures || !got.Known() {
		t.Errorf("of what is known: %+v", got)
	}
}

// The highest rate of each kind is kept. The file is written only at each step.
func TestSee(t *testing.T) {
	var c Capacity
	writes := 0
	for n := uint64(1); n <= 100_000; n++ {
		if c.See(api.BlockIOFigures{ReadIOPS: n, WriteBytes: 5}) {
			writes++
		}
	}
	if c.See(api.BlockIOFigures{ReadIOPS: 7}) || c.Seen != (api.BlockIOFigures{ReadIOPS: 100_000, WriteBytes: 5}) {
		t.Errorf("seen %+v", c.Seen)
	}
	if most := 8 * 17; writes > most {
		t.Errorf("to be written %d times, more than %d", writes, most)
	}
	c.See(api.BlockIOFigures{ReadIOPS: 1 << 62, ReadBytes: 1 << 62})
	testkit.Is(t, "what was seen cannot be read again", c.Check(), nil)
}

// unmeasured is a window at a disk of unknown capacity.
func unmeasured(at int, change change) Window {
	w := window(at, change)
	w.Capacity[disk] = Capacity{Seen: api.BlockIOFigures{ReadIOPS: 5000}}.OrAssumed(api.BlockIOFigures{ReadIOPS: 1000})
	return w
}

// A container that has one request in flight at a time, and gets what the disk can do that way, neither
// interferes nor suffers interference.
func TestOneAtATime(t *testing.T) {
	for _, x := range []struct {
		name  string
		under time.Duration
		reads uint64
		state string
	}{
		{"one at a time", 900 * ms, 500, StateShort},
		{"one at a time, and less than the disk does of these", 900 * ms, 300, StateContended},
		{"two at a time", 1900 * ms, 500, StateContended},
	} {
		w := window(1, func(d *Demand, ns map[container.ID]Neighbour) {
			d.Achieved, d.Under = api.BlockIOFigures{ReadIOPS: x.reads, ReadBytes: x.reads * SmallRequest}, x.under
			d.Waited[burner] = 300 * ms
			ns[hog].IO[disk] = api.BlockIOFigures{ReadIOPS: 5000}
		})
		c := w.Capacity[disk]
		c.Depth1 = api.BlockIOFigures{ReadIOPS: 500, WriteIOPS: 400}
		w.Capacity[disk] = c
		var control Control
		control.Next(window(0, nil))
		control.Next(w)
		s := control.standing[Place{victim, disk}]
		if s.State != x.state || x.state == StateShort && !strings.Contains(s.Evidence, "one request under way at a time") {
			t.Errorf("%s: %+v, want %s", x.name, s, x.state)
		}
	}
}

// What a disk does while its reservations are missed without interference is reported, until it does
// more.
func TestLimit(t *testing.T) {
	var control Control
	limits := make(Limits)
	judge := func(at int, change change) Limit {
		w := unmeasured(at, change)
		control.Next(w)
		limits.Note(w, control.Standings(), nil)
		return limits[disk]
	}
	judge(0, nil)
	if l := judge(1, and(robbed(by{burner: 600 * ms}), of(func(d *Demand) { d.Under = 900 * ms }))); !l.Taken.IsZero() {
		t.Errorf("somebody was in the way: %+v", l)
	}
	if l := judge(2, asking(300, 100*ms, nil)); !l.Taken.IsZero() {
		t.Errorf("it did not ask for more: %+v", l)
	}
	if l := judge(3, asking(300, 4000*ms, nil)); l.Did.ReadIOPS != 300 || l.Depth != 4 {
		t.Errorf("short: %+v", l)
	}
	if l := judge(4, asking(0, 0, nil)); l.Taken.IsZero() {
		t.Error("forgotten, though it asks for nothing now")
	}
	if l := judge(5, nil); !l.Taken.IsZero() {
		t.Errorf("still told, though it is met: %+v", l)
	}
}

// What is offered as reads and as writes can be reserved together.
func TestHalves(t *testing.T) {
	c := Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 20001, WriteIOPS: 9999}, Headroom: 0.1}
	got, known := c.Halves()
	if want := (api.BlockIOFigures{ReadIOPS: 9000, WriteIOPS: 4499}); got != want || !known {
		t.Errorf("%+v, %v, want %+v", got, known, want)
	}
	testkit.Check(t, Admit("/dev/vdb", c, nil, got))
	got.ReadIOPS += 10
	testkit.Fails(t, "more than was offered is admitted", Admit("/dev/vdb", c, nil, got))
	if _, known := (Capacity{}).Halves(); known {
		t.Error("a capacity that nobody measured is known")
	}
}
