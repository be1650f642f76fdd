package isolate

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestDue(t *testing.T) {
	const ms = time.Millisecond
	waits := group{weight: 1024, ran: 250 * ms, waited: 750 * ms}
	for _, c := range []struct {
		name   string
		took   time.Duration
		weight uint64
		others []group
		want   time.Duration
	}{
		{"both the same", 750 * ms, 1024, []group{waits}, 500 * ms},
		{"twice its weight", 700 * ms, 2048, []group{{weight: 1024, ran: 200 * ms, waited: 700 * ms}}, 600 * ms},
		{"it may take more", 300 * ms, 1024, []group{{weight: 1024, ran: 700 * ms, waited: 300 * ms}}, 500 * ms},
		{"no more than the other waited for", 900 * ms, 1024, []group{{weight: 1024, ran: 50 * ms, waited: 60 * ms}}, 840 * ms},
		{"nobody else", 900 * ms, 1024, nil, 0},
		{"an idle group may wait", 900 * ms, 1024, []group{{weight: 0, ran: 0, waited: time.Second}}, 0},
		{"as an idle group it leaves what others want", 900 * ms, 0, []group{{weight: 1024, ran: 100 * ms, waited: 400 * ms}}, 500 * ms},
		{"but never nothing, which is any", 500 * ms, 0, []group{{weight: 1024, ran: 500 * ms, waited: 500 * ms}}, 1},
		{"the best served of those that wait", 600 * ms, 1024, []group{{weight: 1024, ran: 50 * ms, waited: 900 * ms}, {weight: 1024, ran: 200 * ms, waited: 800 * ms}}, 400 * ms},
	} {
		if got := due(c.took, c.weight, c.others); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// The stricter of quota and weight holds, also where next to nothing is due.
func TestDueIn(t *testing.T) {
	for _, c := range []struct {
		quota, due float64
		want       time.Duration
	}{
		{0, 0, 0},
		{0.5, 0, 100 * time.Millisecond},
		{0.5, 0.25, 50 * time.Millisecond},
		{0.25, 0.5, 50 * time.Millisecond},
		{0.5, 1e-9, 1},
		{0, 1e-9, 1},
	} {
		s := isolation{quota: c.quota, due: c.due}
		if got := s.dueIn(time.Second / 5); got != c.want {
			t.Errorf("quota %v, due %v: %v, want %v", c.quota, c.due, got, c.want)
		}
	}
}

// A pod is apart from the uplinks' CPUs only with all of its containers.
func TestApart(t *testing.T) {
	on := func(cpus string) container.Container {
		return container.Container{Cgroup: container.Cgroup{CPUSet: testkit.Tree(t, map[string]string{"cpuset.cpus.effective": cpus + "\n"})}}
	}
	for _, c := range []struct {
		name string
		list []container.Container
		cpus []int
		want bool
	}{
		{"on others", []container.Container{on("1-3")}, []int{0, 4}, true},
		{"on one of them", []container.Container{on("0-1")}, []int{1, 2}, false},
		{"a container of the pod is", []container.Container{on("2"), on("0-1")}, []int{0}, false},
		{"no container of the pod is", []container.Container{on("2"), on("1")}, []int{0}, true},
		{"the uplinks may use any", []container.Container{on("1")}, nil, false},
		{"it is not known", []container.Container{{Cgroup: container.Cgroup{CPUSet: t.TempDir() + "/gone"}}}, []int{0}, false},
	} {
		if got := apart(c.list, c.cpus); got != c.want {
			t.Errorf("%s: %t, want %t", c.name, got, c.want)
		}
	}
}

func TestShort(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		before, now group
		length      time.Duration
		want        time.Duration
		short       bool
	}{
		{group{ran: 100 * ms, waited: 10 * ms}, group{ran: 300 * ms, waited: 70 * ms}, time.Second, 60 * ms, true},
		{group{ran: 100 * ms, waited: 10 * ms}, group{ran: 300 * ms, waited: 50 * ms}, time.Second, 40 * ms, false},
		{group{waited: 70 * ms}, group{waited: 10 * ms}, time.Second, 0, false},
		{group{}, group{ran: 199 * ms, waited: 300 * ms, quota: 0.2}, time.Second, 300 * ms, false},
		{group{}, group{ran: 180 * ms, waited: 300 * ms, quota: 0.2}, time.Second, 300 * ms, true},
	} {
		if g, short := c.now.short(c.before, c.length); g.waited != c.want || short != c.short {
			t.Errorf("from %v to %v: %v, %t, want %v, %t", c.before, c.now, g.waited, short, c.want, c.short)
		}
	}
}
