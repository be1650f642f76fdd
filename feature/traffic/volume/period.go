package volume

import (
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/policy"
)

// The names of periods. A period is known by its name alone: a clock that is set back returns to
// the sums that are there, and one that is set forth leaves them behind.
const (
	dayLayout   = "2006-01-02"
	monthLayout = "2006-01"
)

// Names returns the names of the present day and month.
func (l *Ledger) Names() (day, month string) {
	now := l.cfg.Now().In(l.cfg.Zone)
	return now.Format(dayLayout), now.Format(monthLayout)
}

// Used returns what an account has sent and received in the present period.
func (l *Ledger) Used(account string, per policy.Period) Amount {
	a := l.accounts[account]
	if a == nil {
		return Amount{}
	}
	day, month := l.Names()
	if per == policy.Daily {
		return a.Days[day]
	}
	return a.Months[month]
}

// End returns when the present period ends, which is always later than now.
func (l *Ledger) End(per policy.Period) time.Time {
	now := l.cfg.Now().In(l.cfg.Zone)
	layout := monthLayout
	end := time.Date(now.Year(), now.Month()+1, 1, 0, 0, 0, 0, l.cfg.Zone)
	if per == policy.Daily {
		layout, end = dayLayout, time.Date(now.Year(), now.Month(), now.Day()+1, 0, 0, 0, 0, l.cfg.Zone)
	}
	// Where daylight saving time begins at midnight there is no midnight, and Date may return an
	// hour of the day before.
	for end.Format(layout) == now.Format(layout) {
		end = end.Add(30 * time.Minute)
	}
	return end
}

// Account returns a copy of an account.
func (l *Ledger) Account(name string) (Account, bool) {
	a := l.accounts[name]
	if a == nil {
		return Account{}, false
	}
	out := *a
	out.Days, out.Months = maps.Clone(a.Days), maps.Clone(a.Months)
	return out, true
}

// Accounts lists the names of all accounts, sorted.
func (l *Ledger) Accounts() []string { return slices.Sorted(maps.Keys(l.accounts)) }

// Zone is the time zone of the periods.
func (l *Ledger) Zone() string { return l.cfg.Zone.String() }
