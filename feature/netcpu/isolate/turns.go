package isolate

import (
	"errors"
	"io/fs"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// A thread that polls competes with its container's own tasks, by its nice value; towards other
// containers only the weight of the group counts.
//
// A server with single requests is best off if the thread runs at once, as a softirq would. Under
// load that costs the server a switch to the thread and back for each packet. A thread that lets
// the server finish its present work finds many packets at once then. But beside tasks that compute
// without end it would wait for long. MEASURED.md has the measurement.
type turn int

const (
	prompt turn = iota // it runs before the tasks
	even               // it is one of them
	yield              // they finish first
)

// nice returns the nice value of a turn.
func (t turn) nice() string {
	return strconv.Itoa(map[turn]int{prompt: -5, even: 0, yield: 15}[t])
}

const (
	crowded  = 2.0   // packets per turn: while one was polled, another came;
	oneByOne = 1.5   // and below this they come one by one
	few      = 100   // packets in a window, too few to learn from: those come one by one
	dear     = 2_000 // turns in a window that make it worthwhile to reduce them

	// waitMost is how long a yielding thread may wait for a turn, on average, before it stops
	// yielding: a server that answers many at once works for as long.
	waitMost = 300 * time.Microsecond
	doubt    = 10  // windows between two trials without yielding
	much     = 0.9 // of the packets of the window before; with fewer the last change was bad
)

// turnWindow is the counters of a container's threads in some time.
type turnWindow struct {
	waited         time.Duration
	turns, packets uint64
}

// turnControl chooses how the threads of one container take their turns. The packet rate shows
// whether yielding is good: a client that waits for answers asks less if they come late. The zero
// value is prompt.
type turnControl struct {
	turn     turn
	before   uint64 // packets of the window before the last change, while that is on trial; else 0
	rest     int    // windows since it last gave up yielding, or tried to
	patience int    // windows needed before it yields again; 0: none
}

// next counts one window and returns the turn from now on.
func (c *turnControl) next(w turnWindow) turn {
	if w.packets < few || w.turns == 0 {
		c.turn, c.before = prompt, 0
		return c.turn
	}
	c.rest++
	each := float64(w.packets) / float64(w.turns)
	was := float64(c.before)
	trial := c.before > 0
	c.before = 0
	switch {
	case c.turn == yield && (each < oneByOne || trial && float64(w.packets) < much*was):
		c.giveUp()
	case c.turn == yield:
		if w.waited/time.Duration(w.turns) > waitMost && c.rest >= doubt {
			c.turn, c.before, c.rest = even, max(1, w.packets), 0
		} else if c.rest >= c.patience+forget {
			c.patience = 0
		}
		return c.turn
	case trial && was >= much*float64(w.packets):
		c.turn = yield // the trial has failed
		return c.turn
	case trial:
		c.giveUp()
	case w.turns >= dear && c.rest >= c.patience:
		c.turn, c.before = yield, w.packets
		return c.turn
	}
	// The packets per turn are known only with one of the other two.
	switch {
	case each < oneByOne:
		c.turn = prompt
	case each >= crowded || c.turn == yield:
		c.turn = even
	}
	return c.turn
}

// giveUp makes the next attempt to yield later than the last one.
func (c *turnControl) giveUp() {
	c.rest, c.patience = 0, backoff.Next(c.patience, patience, longest)
}

// niceOf returns the nice value for the threads of a tenant; nil stands for a new tenant. It
// returns "", which leaves the value, if there are no counters to choose by.
func (is *Isolator) niceOf(s *isolation) string {
	switch {
	case is.cfg.Drop == nil:
		return ""
	case s == nil:
		return turnControl{}.turn.nice()
	}
	return s.turns.turn.nice()
}

// taken is takeTurns' last reading of one tenant.
type taken struct {
	sched.Usage
	packets uint64
}

// takeTurns sets the turn of each tenant's threads by its traffic.
func (is *Isolator) takeTurns() error {
	return is.counting(func(s *isolation) error {
		now, err := is.takenBy(s)
		last := s.taken
		s.taken = now
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, journal.ErrGone) {
			return nil // the kernel does not count, or one has ended
		}
		if err != nil {
			return err
		}
		if last.Turns == 0 || now.Turns < last.Turns || now.Waited < last.Waited || now.packets < last.packets {
			return nil // the first time, or other threads
		}
		before := s.turns
		next := s.turns.next(turnWindow{now.Waited - last.Waited, now.Turns - last.Turns, now.packets - last.packets})
		if next == before.turn {
			return nil
		}
		var errs []error
		s.at.nice = next.nice()
		for _, th := range s.threads {
			if err := is.turn(pacing(is.cfg.Roots.Proc, th.Thread, sched.NoSlice, s.at.nice), s.payer.ID); IgnoreGone(err) != nil {
				s.turns = before // so that the next window tries again
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
}

// takenBy returns the counters of a tenant's threads so far; zero with an error.
func (is *Isolator) takenBy(s *isolation) (sum taken, err error) {
	c, err := s.drops.Counters()
	if err != nil {
		return taken{}, err
	}
	sum.packets = c.Small
	for _, th := range s.threads {
		u, err := sched.UsageOf(is.cfg.Roots.Proc, th.Thread)
		if err != nil {
			return taken{}, err
		}
		sum.Ran += u.Ran
		sum.Waited += u.Waited
		sum.Turns += u.Turns
	}
	return sum, nil
}
