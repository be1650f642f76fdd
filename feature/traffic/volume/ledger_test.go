package volume

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/policy"
)

// rig is a ledger under a clock that can be set.
type rig struct {
	*Ledger
	t    *testing.T
	cfg  Config
	wall time.Time
	up   time.Duration
}

func newRig(t *testing.T, zone, now string) *rig {
	t.Helper()
	loc, err := time.LoadLocation(zone)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, up: time.Hour}
	r.cfg = Config{
		Path: filepath.Join(t.TempDir(), "volumes.json"), Boot: "one", Zone: loc,
		Now: func() time.Time { return r.wall }, Uptime: func() time.Duration { return r.up },
	}
	r.set(now)
	r.open()
	return r
}

// set sets the clock to a local time; the uptime stays.
func (r *rig) set(now string) {
	r.t.Helper()
	at, err := time.ParseInLocation("2006-01-02 15:04", now, r.cfg.Zone)
	if err != nil {
		r.t.Fatal(err)
	}
	r.wall = at
}

// pass lets time pass.
func (r *rig) pass(d time.Duration) { r.wall, r.up = r.wall.Add(d), r.up+d }

// open makes the ledger anew, from the file as it is: an agent was killed and another one starts.
func (r *rig) open() {
	r.t.Helper()
	l, err := Open(r.cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.Ledger = l
}

func (r *rig) count(d Device, account string, sent, received uint64) {
	r.t.Helper()
	if err := r.Count(d, account, Amount{sent, received}, true); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) save() {
	r.t.Helper()
	if err := r.Save(); err != nil {
		r.t.Fatal(err)
	}
}

// is compares the total and the periods of an account, as "2026-11-26 5/7".
func (r *rig) is(what, account string, total Amount, days, months map[string]Amount) {
	r.t.Helper()
	a, _ := r.Account(account)
	if a.Total != total || days != nil && !reflect.DeepEqual(a.Days, days) || months != nil && !reflect.DeepEqual(a.Months, months) {
		r.t.Errorf("%s: %s has %+v, want total %v, days %v, months %v", what, account, a, total, days, months)
	}
}

var eth = Device{NetNS: 1, Index: 7}

// Counters continue, begin again, or belong to another device.
func TestCounting(t *testing.T) {
	r := newRig(t, "UTC", "2026-11-26 12:00")
	if err := r.Count(eth, "a", Amount{1000, 2000}, false); err != nil {
		t.Fatal(err)
	}
	r.is("from before the agent", "a", Amount{}, nil, nil)
	r.count(eth, "a", 1500, 2100)
	r.count(eth, "a", 1500, 2100)
	r.is("twice the same", "a", Amount{500, 100}, nil, nil)
	r.count(eth, "a", 30, 2150)
	r.is("the device sent from 0 again", "a", Amount{530, 150}, nil, nil)
	r.count(Device{1, 8}, "a", 5, 5)
	r.is("another device, made since", "a", Amount{535, 155}, nil, nil)
	r.count(eth, "b", 130, 2250)
	r.is("the device's container has another name", "a", Amount{535, 155}, nil, nil)
	r.is("the device's container has another name", "b", Amount{100, 100}, nil, nil)
	r.Told(eth, Amount{0, 2300}, false)
	r.is("a message without one counter", "b", Amount{100, 150}, nil, nil)
	r.count(eth, "b", 140, 2300)
	r.is("after it", "b", Amount{110, 150}, nil, nil)
	r.Told(eth, Amount{200, 2300}, true)
	r.Told(eth, Amount{900, 9000}, true)
	r.is("the device has gone", "b", Amount{170, 150}, nil, nil)
	r.Told(Device{9, 9}, Amount{1, 1}, false)
	if got := r.Devices(); len(got) != 1 || got[Device{1, 8}] != "a" {
		t.Errorf("devices %v", got)
	}
	r.count(eth, "c", 1<<63, 1<<63)
	r.count(eth, "c", 1<<63+5, 1<<63+5)
	r.is("a large counter", "c", Amount{1<<63 + 5, 1<<63 + 5}, nil, nil)
}

// A killed agent loses what it had not written of devices that have gone, nothing else, and the
// next one counts nothing twice. Another boot has other devices.
func TestRestart(t *testing.T) {
	r := newRig(t, "UTC", "2026-11-26 12:00")
	r.Seen(7)
	r.count(eth, "a", 1000, 0)
	r.Hold([]policy.Decision{{Container: 5, Key: "k", Value: "v"}})
	r.save()
	saved := r.up
	r.pass(10 * time.Second)
	r.count(eth, "a", 1500, 0) // not written
	r.open()
	if r.Since() != saved || r.Top() != 7 || len(r.Held()) != 1 {
		t.Errorf("since %v, want %v; top %d; held %v", r.Since(), saved, r.Top(), r.Held())
	}
	r.count(eth, "a", 1700, 0)
	r.is("after a kill", "a", Amount{Sent: 1700}, nil, nil)
	r.save()
	r.cfg.Boot, r.up = "two", time.Minute
	r.open()
	if len(r.Devices()) != 0 || r.Since() != 0 || r.Top() != 0 || len(r.Held()) != 0 {
		t.Errorf("after a boot: devices %v, since %v, top %d, held %v", r.Devices(), r.Since(), r.Top(), r.Held())
	}
	r.count(eth, "a", 1800, 0) // by chance the same numbers
	r.is("after a boot", "a", Amount{Sent: 3500}, map[string]Amount{"2026-11-26": {Sent: 3500}}, nil)
}

// Months of different length, daylight saving time, leap days.
func TestPeriods(t *testing.T) {
	for _, tt := range []struct{ zone, now, day, month, dayEnd, monthEnd string }{
		{"UTC", "2026-11-26 23:59", "2026-11-26", "2026-11", "2026-11-27T00:00:00Z", "2026-12-01T00:00:00Z"},
		{"UTC", "2026-01-31 00:00", "2026-01-31", "2026-01", "2026-02-01T00:00:00Z", "2026-02-01T00:00:00Z"},
		{"UTC", "2026-02-28 12:00", "2026-02-28", "2026-02", "2026-03-01T00:00:00Z", "2026-03-01T00:00:00Z"},
		{"UTC", "2028-02-28 12:00", "2028-02-28", "2028-02", "2028-02-29T00:00:00Z", "2028-03-01T00:00:00Z"},
		{"UTC", "2026-12-31 12:00", "2026-12-31", "2026-12", "2027-01-01T00:00:00Z", "2027-01-01T00:00:00Z"},
		{"Europe/Berlin", "2026-03-29 01:30", "2026-03-29", "2026-03", "2026-03-30T00:00:00+02:00", "2026-04-01T00:00:00+02:00"},     // 23 hours
		{"Europe/Berlin", "2026-10-25 12:00", "2026-10-25", "2026-10", "2026-10-26T00:00:00+01:00", "2026-11-01T00:00:00+01:00"},     // 25 hours
		{"America/Sao_Paulo", "2018-11-03 23:45", "2018-11-03", "2018-11", "2018-11-04T01:00:00-02:00", "2018-12-01T00:00:00-02:00"}, // no midnight
		{"Pacific/Apia", "2011-12-29 12:00", "2011-12-29", "2011-12", "2011-12-31T00:00:00+14:00", "2012-01-01T00:00:00+14:00"},      // no 30 December
	} {
		r := newRig(t, tt.zone, tt.now)
		day, month := r.Names()
		d, m := r.End(policy.Daily).Format(time.RFC3339), r.End(policy.Monthly).Format(time.RFC3339)
		if day != tt.day || month != tt.month || d != tt.dayEnd || m != tt.monthEnd {
			t.Errorf("%s in %s: %s until %s, %s until %s; want %+v", tt.now, tt.zone, day, d, month, m, tt)
		}
		r.wall = r.End(policy.Daily)
		if next, _ := r.Names(); next == day {
			t.Errorf("%s in %s: the day goes on after its end", tt.now, tt.zone)
		}
	}
}

// A clock that is set, in either direction, returns to the sums that are there: none is lost, and
// none begins anew.
func TestClockIsSet(t *testing.T) {
	r := newRig(t, "UTC", "2026-11-30 23:50")
	sent := uint64(0)
	send := func(n uint64) { sent += n; r.count(eth, "a", sent, 0) }
	used := func(what string, day, month uint64) {
		t.Helper()
		if d, m := r.Used("a", policy.Daily).Sent, r.Used("a", policy.Monthly).Sent; d != day || m != month {
			t.Errorf("%s: %d in this day and %d in this month, want %d and %d", what, d, m, day, month)
		}
	}
	send(100)
	used("in November", 100, 100)
	r.pass(20 * time.Minute)
	used("in December", 0, 0)
	send(10)
	used("in December", 10, 10)
	r.set("2026-11-30 23:55")
	used("set back", 100, 100)
	send(1)
	used("set back", 101, 101)
	r.set("2031-05-05 00:00")
	send(1000)
	used("years ahead", 1000, 1000)
	r.save()
	r.open()
	r.set("1970-01-01 00:00")
	send(2000)
	used("without a clock", 2000, 2000)
	r.set("2026-12-01 00:15")
	used("right again", 10, 10)
	send(5)
	used("right again", 15, 15)
	r.is("all", "a", Amount{Sent: sent}, nil, map[string]Amount{"2026-11": {Sent: 101}, "2026-12": {Sent: 15}, "2031-05": {Sent: 1000}, "1970-01": {Sent: 2000}})

	// Strange periods go before true ones, whose number is bounded.
	for range 800 {
		r.pass(24 * time.Hour)
		send(1)
	}
	a, _ := r.Account("a")
	if len(a.Days) != mostDays || len(a.Months) != mostMonths || a.Months["2031-05"].Sent != 0 || a.Months["1970-01"].Sent != 0 || a.Total.Sent != sent {
		t.Errorf("%d days, %d months, %+v", len(a.Days), len(a.Months), a)
	}
}

// Old accounts go, but not because a clock was set, and not while there are devices of theirs.
func TestAge(t *testing.T) {
	r := newRig(t, "UTC", "2026-11-26 12:00")
	r.count(eth, "old", 1, 1)
	r.Gone(eth)
	r.count(Device{1, 8}, "running", 1, 1)
	has := func(what string, want ...string) {
		t.Helper()
		r.save()
		if got := r.Accounts(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	r.set("2031-01-01 00:00")
	r.pass(time.Minute)
	has("the clock was set by years", "old", "running")
	r.pass(23 * time.Hour)
	has("a day has not passed", "old", "running")
	r.set("2026-11-27 12:00")
	has("right again", "old", "running")
	r.pass(12 * 31 * 24 * time.Hour)
	r.count(Device{1, 8}, "running", 1, 1)
	has("a year later", "old", "running")
	r.pass(40 * 24 * time.Hour)
	r.count(Device{1, 8}, "running", 1, 1)
	has("13 months later", "running")
	r.pass(keptDevices)
	r.save()
	if len(r.Devices()) != 1 {
		t.Errorf("after a day: devices %v", r.Devices())
	}
	r.pass(time.Second)
	r.save()
	if len(r.Devices()) != 0 {
		t.Errorf("after more than a day: devices %v", r.Devices())
	}
}

// The number of accounts is bounded; those in use stay.
func TestFull(t *testing.T) {
	r := newRig(t, "UTC", "2026-11-26 12:00")
	for i := range mostAccounts {
		r.pass(time.Second)
		r.count(Device{1, i}, fmt.Sprint("a", i), 1, 1)
	}
	if err := r.Count(Device{2, 1}, "more", Amount{1, 1}, true); !errors.Is(err, ErrFull) {
		t.Errorf("all are in use: %v", err)
	}
	r.Gone(Device{1, 9})
	r.Gone(Device{1, 5})
	r.count(Device{2, 1}, "more", 1, 1)
	if _, there := r.Account("a5"); there || len(r.Accounts()) != mostAccounts {
		t.Errorf("%d accounts, a5 is there: %v", len(r.Accounts()), there)
	}
	r.save()
	r.open()
	if len(r.Accounts()) != mostAccounts || len(r.Devices()) != mostAccounts-1 {
		t.Errorf("read back: %d accounts, %d devices", len(r.Accounts()), len(r.Devices()))
	}
}

// A file that cannot be used is set aside, and no reason not to count.
func TestDamagedFile(t *testing.T) {
	for _, text := range []string{"", "{", `{"version":2}`, `{"version":1,"accounts":[null]}`, `{"version":1,"accounts":[{"name":"a","days":{"x":{}}}]}`} {
		r := newRig(t, "UTC", "2026-11-26 12:00")
		if err := os.WriteFile(r.cfg.Path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := Open(r.cfg)
		aside, _ := os.ReadFile(r.cfg.Path + ".damaged")
		if err == nil || string(aside) != text || len(l.Accounts()) != 0 {
			t.Errorf("%q: %v; set aside %q; %v", text, err, aside, l.Accounts())
		}
		if err := errors.Join(l.Count(eth, "a", Amount{1, 1}, true), l.Save()); err != nil {
			t.Error(err)
		}
	}
	r := newRig(t, "UTC", "2026-11-26 12:00")
	r.cfg.Path = filepath.Join(r.cfg.Path, "x") // below a file
	if err := os.WriteFile(filepath.Dir(r.cfg.Path), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l, _ := Open(Config{Path: r.cfg.Path, Boot: "one", Zone: time.UTC, Now: r.cfg.Now, Uptime: r.cfg.Uptime})
	l.Seen(1)
	if err := l.Save(); err == nil || !strings.Contains(err.Error(), "write volumes") {
		t.Errorf("no place for the file: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	s := state{Version: version, Boot: "one", Devices: []device{{Device: eth, Account: "a"}}, Held: []policy.Decision{{Key: "k"}},
		Accounts: []*Account{{Name: "a", Days: map[string]Amount{"2026-11-26": {1, 2}}, Months: map[string]Amount{"2026-11": {1, 2}}}}}
	data, err := json.Marshal(s)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	for _, text := range []string{"null", "{}", `{"version":1,"accounts":[{"name":""}]}`, `{"version":1,"devices":[{}]}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := parse(data)
		if (err == nil) == (s == nil) {
			t.Fatalf("both or neither: %+v, %v", s, err)
		}
		if err != nil {
			return
		}
		for _, a := range s.Accounts {
			if a.Name == "" || a.Days == nil || a.Months == nil {
				t.Errorf("account %+v", a)
			}
		}
	})
}
