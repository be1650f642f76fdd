package isolate

import (
	"errors"
	"io/fs"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// A thread that polls competes with its container's own tasks, by its nice value; towards
// other containers the weight is the group's, and the same with each of these.
//
// A server whose requests each come alone is best off if the thread takes its turn at
// once: a softirq would have. Under load that costs the server a switch to the thread and
// back for each packet. A thread that lets the server finish what it has under way finds
// many packets at once then. But beside tasks that compute without end it would wait for
// long. MEASURED.md has the measurement.
type turn int

const (
	prompt turn = iota // it takes its turn before the tasks
	even               // it is one of them
	yield              // they finish first
)

// nice returns the nice value of a turn.
func (t turn) nice() string {
	return strconv.Itoa(map[turn]int{prompt: -5, even: 0, yield: 15}[t])
}

const (
	crowded  = 2.0   // packets in each turn: while one was polled, another came,
	oneByOne = 1.5   // and below this they come one by one
	few      = 100   // packets in a window, of which nothing is learnt: those come one by one
	dear     = 2_000 // turns in a window that are worth an attempt to make them fewer

	// waitMost is how long a yielding thread may wait for a turn, on average, without
	// a doubt that it should yield: a server that answers many at once works for as long.
	waitMost = 300 * time.Microsecond
	doubt    = 10  // windows between two doubts
	much     = 0.9 // of the packets of the window before: fewer, and the last change was bad
)

// turnWindow is what the threads of a container did in some time.
type turnWindow struct {
	waited         time.Duration
	turns, packets uint64
}

// turnControl chooses how the threads of one container take their turns. Whether it is good
// that they yield is told by how many packets come then: a client that waits for answers
// asks less where they come late. The zero value is prompt.
type turnControl struct {
	turn     turn
	before   uint64 // packets of the window before the last change, while that is on trial; 0: it is not
	rest     int    // windows since it last had to give up yielding, or doubted it
	patience int    // how many there have to be before it yields again; 0: none
}

// next takes one window into account and returns the turn from now on.
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
		c.turn = yield // the doubt was unfounded
		return c.turn
	case trial:
		c.giveUp()
	case w.turns >= dear && c.rest >= c.patience:
		c.turn, c.before = yield, w.packets
		return c.turn
	}
	// How many come together in a turn is known of the other two only if it has one of them.
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
	c.rest, c.patience = 0, min(max(patience, 2*c.patience), longest)
}

// niceOf is the nice value that the threads of a tenant are to have; nil is one to come. It
// is "", which leaves the value, where nobody counts by what it could be chosen.
func (is *Isolator) niceOf(t *tenant) string {
	switch {
	case is.cfg.Drop == nil:
		return ""
	case t == nil:
		return turnControl{}.turn.nice()
	}
	return t.turns.turn.nice()
}

// taken is what takeTurns last read of one tenant.
type taken struct {
	sched.Usage
	packets uint64
}

// takeTurns has the threads of each tenant take their turns as its traffic asks for.
func (is *Isolator) takeTurns() error {
	var errs []error
	ran := make(map[container.ID]time.Duration)
	defer is.ran.Store(&ran)
	for _, t := range is.tenants {
		if t.drops == nil {
			continue // nobody counts its packets
		}
		now, err := is.takenBy(t)
		ran[t.owner] = now.Ran
		last := t.taken
		t.taken = now
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, journal.ErrGone) {
			continue // the kernel does not count, or one has ended
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if last.Turns == 0 || now.Turns < last.Turns || now.Waited < last.Waited || now.packets < last.packets {
			continue // the first time, or other threads
		}
		before := t.turns
		next := t.turns.next(turnWindow{now.Waited - last.Waited, now.Turns - last.Turns, now.packets - last.packets})
		if next == before.turn {
			continue
		}
		t.at.nice = next.nice()
		for _, th := range t.threads {
			if err := is.turn(pacing(is.cfg.Roots.Proc, th.Thread, sched.NoSlice, t.at.nice), t.owner); IgnoreGone(err) != nil {
				t.turns = before // so that the next window tries again
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// Ran is the CPU time of the threads of each container that is isolated, as of the last
// window. It may be called at any time. The map is not to be changed.
func (is *Isolator) Ran() map[container.ID]time.Duration {
	if ran := is.ran.Load(); ran != nil {
		return *ran
	}
	return nil
}

// takenBy is what the threads of a tenant have done so far; nothing with an error.
func (is *Isolator) takenBy(t *tenant) (sum taken, err error) {
	c, err := t.drops.Counters()
	if err != nil {
		return taken{}, err
	}
	sum.packets = c.Small
	for _, th := range t.threads {
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
