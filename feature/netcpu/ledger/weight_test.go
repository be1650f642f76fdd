package ledger

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-project/fairlead/feature/netcpu/law"
)

// weighed runs weighers over a CPU, each stepped at a fixed interval.
type weighed struct {
	cpu
	weighers []*Weigher
	owner    []float64 // the owners' weights
	every    time.Duration
}

func newWeighed(every time.Duration, tasks ...*task) *weighed {
	h := &weighed{cpu: cpu{tasks: tasks}, every: every}
	for _, k := range tasks {
		h.weighers = append(h.weighers, NewWeigher())
		h.owner = append(h.owner, k.weight)
	}
	return h
}

func (h *weighed) run(length time.Duration) {
	sum := 0.0
	for _, w := range h.owner {
		sum += w
	}
	for end := h.now + length; h.now < end; {
		h.step()
		if h.now%h.every >= tick {
			continue
		}
		for i, k := range h.tasks {
			k.weight = h.owner[i] * h.weighers[i].Step(k.c, Share{Fair: h.owner[i] / sum, Contended: true})
		}
	}
}

// costs returns the cost of each container in CPUs.
func (h *weighed) costs(length time.Duration) (out []float64) {
	for _, d := range h.spent(func() { h.run(length) }) {
		out = append(out, float64(d)/float64(length))
	}
	return out
}

// Containers that all compute forever cost time in proportion to their weights, whatever part of it
// packets take.
func TestWeightsConverge(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 5).Draw(t, "containers")
		var tasks []*task
		sum := 0.0
		for i := range n {
			k := newTask(0)
			k.weight = float64(rapid.IntRange(2, 8).Draw(t, fmt.Sprintf("weight%d", i)))
			sum += k.weight
			tasks = append(tasks, k)
		}
		for i, k := range tasks {
			k.net = constant(rapid.Float64Range(0, 0.8).Draw(t, fmt.Sprintf("net%d", i)) * k.weight / sum)
		}
		h := newWeighed(time.Duration(rapid.IntRange(50, 500).Draw(t, "every"))*ms, tasks...)
		h.run(5 * time.Second)
		writes := make([]uint64, n)
		for i, w := range h.weighers {
			writes[i] = w.State().Writes
		}
		for i, got := range h.costs(4 * time.Second) {
			want := h.owner[i] / sum
			if got < 0.9*want || got > 1.1*want {
				t.Errorf("container %d cost %.3f of %.3f with factor %.3f", i, got, want, h.weighers[i].now)
			}
			if k := h.tasks[i]; k.work == 0 {
				t.Errorf("container %d starved", i)
			}
			if w := h.weighers[i].State().Writes - writes[i]; w > 8 {
				t.Errorf("container %d: %d writes in 4 s of the same", i, w)
			}
		}
	})
}

func TestWeigh(t *testing.T) {
	for _, tt := range []struct {
		name                string
		ran, charge, credit time.Duration // in 100 ms
		share               Share
		want                float64 // after a long time
	}{
		{"no packets", 50 * ms, 0, 0, Share{Fair: 0.5, Contended: true}, 1},
		{"no tasks and no packets", 0, 0, 0, Share{Fair: 0, Contended: true}, 1},
		{"half of its share", 25 * ms, 25 * ms, 0, Share{Fair: 0.5, Contended: true}, 0.5},
		{"far below its share", ms, 2 * ms, 0, Share{Fair: 0.5, Contended: true}, 0.96},
		{"beyond its share", 75 * ms, 25 * ms, 0, Share{Fair: 0.5, Contended: true}, 0.75},
		{"nobody else", 25 * ms, 25 * ms, 0, Share{Fair: 0.5, Contended: false}, 1},
		{"more than its share", 10 * ms, 70 * ms, 0, Share{Fair: 0.5, Contended: true}, 0.125},
		{"only packets", 0, 70 * ms, 0, Share{Fair: 0.5, Contended: true}, minFactor},
		{"robbed", 50 * ms, 0, 20 * ms, Share{Fair: 0.5, Contended: true}, 1.4},
		{"robbed of nearly all", 50 * ms, 0, 49 * ms, Share{Fair: 0.01, Contended: true}, law.Most},
	} {
		w := NewWeigher()
		var got float64
		for i := range 100 {
			got = w.Step(counters(i+1, tt.ran, tt.charge, tt.credit, 0), tt.share)
		}
		if got < 0.95*tt.want || got > 1.05*tt.want || tt.want == 1 && got != 1 {
			t.Errorf("%s: factor %v, want %v", tt.name, got, tt.want)
		}
	}
}

// Nine neighbours pay by their quotas for the time that they take, and keep their weights: the
// victim's weight has to make up for all of them.
func TestCatchUp(t *testing.T) {
	const (
		cpu   = 0.95 // what others leave
		quota = 0.1
		most  = 0.03 // stolen
	)
	for _, tt := range []struct {
		name   string
		wants  float64 // to run
		quota  float64 // in force
		stolen float64
		told   bool // its wait time is known
		cpus   int
		factor float64
	}{
		{"all that is due", 1, quota + most, most, false, 1, 9 * (quota + most) / (cpu - quota - most)},
		{"all that is due, and waits", 1, quota + most, most, true, 1, 9 * (quota + most) / (cpu - quota - most)},
		{"less than its quota", 0.07, quota + most, most, false, 1, 1 + most/quota}, // by what is stolen alone
		{"a quota that does not let it", 1, quota, most, false, 1, 1 + most/quota},
		{"nearly its quota, and never waits", 0.085, quota + 0.002, 0.002, true, 1, 1},
		{"nearly its quota, on CPUs that are not known", 0.085, quota + 0.002, 0.002, true, 0, law.Most},
	} {
		w, weight := NewWeigher(), 1.0
		var c Counters
		if tt.told {
			c.Waited = ms
		}
		length := float64(100 * ms)
		for i := range 200 {
			own := min(tt.wants, tt.quota, cpu*weight/(9+weight))
			held := own == tt.quota
			c.Taken = epoch.Add(time.Duration(i+1) * 100 * ms)
			c.Ran += time.Duration(own * length)
			c.Credit += time.Duration(tt.stolen * length)
			if tt.told {
				c.Waited += time.Duration((tt.wants - own) * length)
			}
			weight = w.Step(c, Share{Fair: quota, Contended: true, Quota: quota, Due: quota + tt.stolen, Held: held, CPUs: tt.cpus})
		}
		if weight < 0.95*tt.factor || weight > 1.08*tt.factor {
			t.Errorf("%s: factor %v, want %v", tt.name, weight, tt.factor)
		}
	}
}

// A weight that makes full use of the quota stays, and follows the due.
func TestCatchUpHolds(t *testing.T) {
	w, i := NewWeigher(), 0
	step := func(share Share, n int) (factor float64) {
		for range n {
			i++
			factor = w.Step(counters(i, 13*ms, 0, 3*ms, 0), share)
		}
		return factor
	}
	share := Share{Fair: 0.1, Contended: true, Quota: 0.1, Due: 0.2}
	most := step(share, 100)
	if most < 0.95*law.Most || most > law.Most {
		t.Fatalf("factor %v of a container that runs 13 of 20 ms, whatever its weight", most)
	}
	share.Held = true
	if f := step(share, 100); f != most {
		t.Errorf("factor %v, held by its quota", f)
	}
	share.Due = 0.1
	if f := step(share, 100); f < 1.2 || f > 1.4 { // by what is stolen alone
		t.Errorf("factor %v with nothing due", f)
	}
	share.Contended = false
	if f := step(share, 100); f != 1 {
		t.Errorf("factor %v afterwards", f)
	}
}

func TestWeigherBudget(t *testing.T) {
	w := NewWeigher()
	flood := func(share Share) time.Duration {
		for i := range 100 {
			w.Step(counters(i+1, 10*ms, 90*ms, 0, 0), share)
		}
		return w.Budget(100*ms, share, 0)
	}
	if got := flood(Share{Fair: 0.5, Contended: false}); got != Unlimited {
		t.Errorf("budget %v of an idle CPU", got)
	}
	if got := flood(Share{Fair: 0.5, Contended: true}); got != Unlimited { // its weight can charge its own tenth
		t.Errorf("budget %v though weight is enough", got)
	}
	w = NewWeigher()
	for i := range 100 {
		w.Step(counters(i+1, 0, 90*ms, 0, 0), Share{Fair: 0.5, Contended: true})
	}
	if got := w.Budget(100*ms, Share{Fair: 0.5, Contended: true}, 0.1); got != 45*ms {
		t.Errorf("budget %v of a container that only gets packets", got)
	}
}
