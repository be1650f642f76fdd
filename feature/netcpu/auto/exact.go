package auto

import (
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// untold adds the thefts without a pair to the evidence about a container: the table of pairs has
// room for some hundred containers. The part of ksoftirqd in them is not known, so all of them
// count like ksoftirqd's.
func (d reading) untold(id container.ID, e *evidence, took map[string]time.Duration) {
	robbed, rest := d.robbed[id], d.took[id]
	for _, t := range d.thefts {
		if t.Culprit == id && (t.Victim.Kind == account.Task || t.Victim.Kind == account.Peer || t.Victim.Kind == account.Ksoftirqd) {
			rest -= t.CPU
		}
		if t.Victim.Container == id && t.Victim.Kind == account.Peer {
			robbed -= t.CPU
		}
	}
	e.lost = max(e.lost, robbed)
	if rest <= 0 {
		return
	}
	lost := time.Duration(float64(rest) * d.wanted)
	e.idle += rest - lost
	took["others, not told apart"] += lost
}
