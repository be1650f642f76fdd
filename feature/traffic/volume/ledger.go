// Package volume keeps the accounts of what containers have sent and received, by day and month.
//
// It is the arithmetic and the file: it reads no counters and knows no containers. Package traffic
// tells it which device belongs to which account, and what the kernel has counted there. As a
// device counts on while no agent runs, and the file holds what was last counted together with the
// sums, an agent that was killed loses nothing of devices that live on, and counts nothing twice.
package volume

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/fairlead-project/fairlead/policy"
)

// What is kept.
const (
	mostAccounts = 4096
	mostDevices  = 1 << 16
	mostDays     = 62
	mostMonths   = 14 // the present one and 13 more
	keptMonths   = 13 // of an account without traffic
)

// keptDevices is how long a device is known that no container has, as a runtime may not answer: if it
// was taken for a new one then, all of it would count again.
const keptDevices = 24 * time.Hour

// A clock that was set is trusted again after steady: until then no account is dropped for its age.
const steady = 24 * time.Hour

// ErrFull means that there are too many accounts, all of them in use.
var ErrFull = errors.New("too many accounts")

// Amount is a number of bytes, as seen from the container.
type Amount struct {
	Sent     uint64 `json:"s,omitempty"`
	Received uint64 `json:"r,omitempty"`
}

// Of returns the part that a volume counts.
func (a Amount) Of(c policy.Counted) uint64 {
	switch c {
	case policy.OnlySent:
		return a.Sent
	case policy.OnlyReceived:
		return a.Received
	}
	return a.Sent + a.Received
}

func (a Amount) plus(b Amount) Amount { return Amount{a.Sent + b.Sent, a.Received + b.Received} }

// Device is a network device, by a number of its namespace that is not used again before the next
// boot, and its index there.
type Device struct {
	NetNS uint64 `json:"netns"`
	Index int    `json:"index"`
}

// Account is what one container has sent and received, under all its incarnations.
type Account struct {
	Name  string    `json:"name"`
	First time.Time `json:"first"` // when it was opened
	Last  time.Time `json:"last"`  // when it was last in use
	Total Amount    `json:"total"`
	// Days and Months have the periods with traffic, as 2006-01-02 and 2006-01.
	Days   map[string]Amount `json:"days"`
	Months map[string]Amount `json:"months"`
}

// device is what was last counted at a device, and whose it is.
type device struct {
	Device
	Account string        `json:"account"`
	Counted Amount        `json:"counted"`
	at      time.Duration // uptime of the last Count
}

// Config is what Open needs.
type Config struct {
	Path   string // of the file; "": nothing is kept
	Boot   string // id of this boot
	Zone   *time.Location
	Now    func() time.Time
	Uptime func() time.Duration // since the boot, also while the host sleeps
}

// Ledger holds all accounts. Make it with Open. It is not safe for concurrent use.
type Ledger struct {
	cfg      Config
	accounts map[string]*Account
	devices  map[Device]*device
	held     []policy.Decision
	since    time.Duration // uptime of the last save of the agent before; of Open if there was none
	top      int           // highest index then; -1: not known
	newTop   int
	dirty    bool

	offset time.Duration // of the clock from the uptime, at the last look
	stood  time.Duration // uptime since when it has not been set
}

// Open reads the file. A file that cannot be used is set aside as PATH.damaged; the Ledger is then
// empty, and usable beside the error.
func Open(cfg Config) (*Ledger, error) {
	l := &Ledger{cfg: cfg, accounts: make(map[string]*Account), devices: make(map[Device]*device), since: cfg.Uptime(), top: -1}
	l.stood, l.offset = l.since, l.ahead()
	s, err := read(cfg.Path)
	if err != nil {
		return l, errors.Join(fmt.Errorf("read volumes: %w", err), os.Rename(cfg.Path, cfg.Path+".damaged"))
	}
	if s == nil {
		return l, nil
	}
	for _, a := range s.Accounts {
		l.accounts[a.Name] = a
	}
	if s.Boot != cfg.Boot { // every device is another
		l.since, l.top = 0, 0
		return l, nil
	}
	l.since, l.top, l.newTop, l.held = s.Uptime, s.Top, s.Top, s.Held
	for _, d := range s.Devices {
		d.at = l.stood
		l.devices[d.Device] = &d
	}
	return l, nil
}

// Since returns the uptime up to which an agent has seen every device: what was made later has
// counted nothing that anyone knows of.
func (l *Ledger) Since() time.Duration { return l.since }

// Top is the same for devices of the host's namespace, where indexes only grow: those with a higher
// one were made later. It is -1 while no agent has ever looked.
func (l *Ledger) Top() int { return l.top }

// Seen notes an index in the host's namespace for Top of the next agent, and for this one's if that
// is -1.
func (l *Ledger) Seen(top int) {
	if l.top < 0 {
		l.top = top
	}
	if l.newTop < top {
		l.newTop, l.dirty = top, true
	}
}

// Count books what a device has counted since it was last seen, for an account. What a device
// counted before it is seen for the first time counts if it is fresh. Counters that have become
// smaller have begun again at 0. Errors: ErrFull.
func (l *Ledger) Count(d Device, account string, now Amount, fresh bool) error {
	a, err := l.open(account)
	if err != nil {
		return err
	}
	m := l.devices[d]
	if m == nil {
		if len(l.devices) >= mostDevices {
			return ErrFull
		}
		m = &device{Device: d}
		if !fresh {
			m.Counted = now
		}
		l.devices[d], l.dirty = m, true
	}
	var passed Amount
	if passed.Sent = now.Sent; now.Sent >= m.Counted.Sent {
		passed.Sent -= m.Counted.Sent
	}
	if passed.Received = now.Received; now.Received >= m.Counted.Received {
		passed.Received -= m.Counted.Received
	}
	m.Account, m.Counted, m.at = account, now, l.cfg.Uptime()
	l.book(a, passed)
	return nil
}

// Told books what the kernel told of a device on its own: only what is more than before, as some of
// the counters of a device that goes are missing there. Devices that were never counted are left
// out.
func (l *Ledger) Told(d Device, now Amount, removed bool) {
	m := l.devices[d]
	if m == nil {
		return
	}
	now = Amount{max(now.Sent, m.Counted.Sent), max(now.Received, m.Counted.Received)}
	if a := l.accounts[m.Account]; a != nil {
		l.book(a, Amount{now.Sent - m.Counted.Sent, now.Received - m.Counted.Received})
	}
	m.Counted = now
	if removed {
		l.Gone(d)
	}
}

// Gone forgets a device.
func (l *Ledger) Gone(d Device) {
	if l.devices[d] != nil {
		delete(l.devices, d)
		l.dirty = true
	}
}

// Devices lists the devices that are counted, with their accounts.
func (l *Ledger) Devices() map[Device]string {
	out := make(map[Device]string, len(l.devices))
	for d, m := range l.devices {
		out[d] = m.Account
	}
	return out
}

// Hold notes decisions for the next agent of this boot, which Held returns then.
func (l *Ledger) Hold(ds []policy.Decision) { l.held, l.dirty = ds, true }

// Held returns the decisions of the last Hold.
func (l *Ledger) Held() []policy.Decision { return l.held }

// open returns an account. A new one may take the place of the one that was longest not in use.
func (l *Ledger) open(name string) (*Account, error) {
	if a := l.accounts[name]; a != nil {
		return a, nil
	}
	if len(l.accounts) >= mostAccounts {
		used := l.used()
		var oldest *Account
		for _, a := range l.accounts {
			if !used[a.Name] && (oldest == nil || a.Last.Before(oldest.Last)) {
				oldest = a
			}
		}
		if oldest == nil {
			return nil, ErrFull
		}
		delete(l.accounts, oldest.Name)
	}
	now := l.cfg.Now().UTC()
	a := &Account{Name: name, First: now, Last: now, Days: make(map[string]Amount), Months: make(map[string]Amount)}
	l.accounts[name], l.dirty = a, true
	return a, nil
}

func (l *Ledger) used() map[string]bool {
	used := make(map[string]bool)
	for _, m := range l.devices {
		used[m.Account] = true
	}
	return used
}

// book adds to the periods of this moment.
func (l *Ledger) book(a *Account, passed Amount) {
	now := l.cfg.Now()
	if passed == (Amount{}) {
		if now.Sub(a.Last).Abs() >= time.Hour {
			a.Last, l.dirty = now.UTC(), true
		}
		return
	}
	a.Last, l.dirty = now.UTC(), true
	a.Total = a.Total.plus(passed)
	day, month := now.In(l.cfg.Zone).Format(dayLayout), now.In(l.cfg.Zone).Format(monthLayout)
	a.Days[day] = a.Days[day].plus(passed)
	a.Months[month] = a.Months[month].plus(passed)
	trim(a.Days, mostDays, dayLayout, now)
	trim(a.Months, mostMonths, monthLayout, now)
}

// trim drops the periods that are farthest from now, in either direction: if the clock was wrong
// for a time, it leaves a strange period, which must not take the place of a true one.
func trim(rows map[string]Amount, most int, layout string, now time.Time) {
	for len(rows) > most {
		farthest, distance := "", time.Duration(-1)
		for key := range rows {
			at, _ := time.Parse(layout, key)
			if d := now.Sub(at).Abs(); d > distance || d == distance && key < farthest {
				farthest, distance = key, d
			}
		}
		delete(rows, farthest)
	}
}

// ahead is how far the clock is ahead of the uptime.
func (l *Ledger) ahead() time.Duration {
	return l.cfg.Now().Sub(time.Unix(0, 0)) - l.cfg.Uptime()
}

// age drops devices that were not counted for keptDevices, and accounts that were not in use for
// keptMonths, unless the clock was set lately: it may have been set by years.
func (l *Ledger) age() {
	up, ahead := l.cfg.Uptime(), l.ahead()
	for d, m := range l.devices {
		if up-m.at > keptDevices {
			l.Gone(d)
		}
	}
	if (ahead - l.offset).Abs() > time.Minute {
		l.stood = up
	}
	l.offset = ahead
	if up-l.stood < steady {
		return
	}
	used, before := l.used(), l.cfg.Now().AddDate(0, -keptMonths, 0)
	for name, a := range l.accounts {
		if !used[name] && a.Last.Before(before) {
			delete(l.accounts, name)
			l.dirty = true
		}
	}
}
