package discover

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// say publishes a report as it is.
func (f *fake) say(rep Report) {
	<-f.ready
	f.publish(rep)
}

func kill(t *testing.T, pid int) {
	t.Helper()
	must(t, unix.Kill(pid, unix.SIGKILL))
}

// names lists the containers of a Snapshot.
func (s Snapshot) names() map[string]bool {
	names := make(map[string]bool)
	for _, c := range s.Containers {
		names[c.Name] = true
	}
	return names
}

func awaitNames(t *testing.T, s *Set, what string, want ...string) Snapshot {
	t.Helper()
	names := make(map[string]bool)
	for _, n := range want {
		names[n] = true
	}
	return await(t, s, what, func(snap Snapshot) bool { return cmp.Equal(snap.names(), names) })
}

// TestSetPartial has a runtime that was started again, and has yet to answer about some of its
// containers: what it said before counts until then. Two of them are in the host's network, where
// no other source would find them.
func TestSetPartial(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	src := newFake("docker")
	s := runSet(t, Config{NetNS: ns.Path}, src)
	record := func(name string) Record {
		pid := sleeper(t, ns, cg.Child(t, name)).Process.Pid
		return Record{PID: pid, Name: name, RuntimeID: name + "-id", Labels: map[string]string{"of": name}}
	}
	a, b, c, d := record("a"), record("b"), record("c"), record("d")
	src.say(Report{Records: []Record{a, b, c, d}})
	awaitNames(t, s, "all of them", "a", "b", "c", "d")

	src.fail(errors.New("connection lost"))
	unread := a
	unread.Labels, unread.ImageLabels, unread.Unread = nil, a.Labels, true
	renamed := b
	renamed.Name = "renamed"
	src.say(Report{Records: []Record{unread, renamed}, Partial: true, Err: errors.New("d: no answer")})
	snap := awaitNames(t, s, "the rest of them", "a", "renamed", "c", "d")
	if st := snap.Sources[0]; st.Err == nil || !st.Partial || st.Records != 4 {
		t.Errorf("source %+v", st)
	}
	if got, _ := named(snap, "a"); got.Labels["of"] != "a" || len(got.ImageLabels) != 0 {
		t.Errorf("a, whose image could not be read this time, has labels %v, of its image %v", got.Labels, got.ImageLabels)
	}
	again := record("again")
	again.RuntimeID = c.RuntimeID // c, which was started again
	kill(t, c.PID)
	src.say(Report{Records: []Record{unread, renamed, again}, Partial: true})
	awaitNames(t, s, "c has ended", "a", "renamed", "again", "d")
	src.say(Report{Records: []Record{unread, again}})
	snap = awaitNames(t, s, "the whole list", "a", "again")
	if got, _ := named(snap, "a"); len(got.Labels) != 0 {
		t.Errorf("a has labels %v though the list is whole", got.Labels)
	}
}

// TestSetKnown starts a Set with what an earlier one knew, while the runtime says nothing.
func TestSetKnown(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	src := newFake("docker")
	s := runSet(t, Config{NetNS: ns.Path}, src)
	record := func(name string) Record {
		return Record{PID: sleeper(t, ns, cg.Child(t, name)).Process.Pid, Name: name, RuntimeID: name + "-id",
			Labels: map[string]string{"of": name}, ImageLabels: map[string]string{"i": name}, LeftOut: map[string]int{"l": 5000},
			Annotations: map[string]bool{"of": true}, Pod: "p", Namespace: "n"}
	}
	a, b := record("a"), record("b")
	src.say(Report{Records: []Record{a, b}})
	before := awaitNames(t, s, "both", "n/p/a", "n/p/b")
	data, err := json.Marshal(before.Known)
	must(t, err)
	var known Known
	must(t, json.Unmarshal(data, &known))
	other := record("other") // another process has its number meanwhile
	other.Start = 1
	known.Records["docker"] = append(known.Records["docker"], other)
	kill(t, b.PID)

	src = newFake("docker")
	s = runSet(t, Config{NetNS: ns.Path, Known: &known}, src)
	snap := awaitNames(t, s, "the one that lives", "n/p/a")
	was, _ := named(before, "n/p/a")
	now, _ := named(snap, "n/p/a")
	now.Started = was.Started // by two readings of the clock
	testkit.Same(t, "a", was, now)
	if st := snap.Sources[0]; snap.Complete || st.Listed || !st.Partial {
		t.Errorf("complete %v, source %+v", snap.Complete, st)
	}
	src.say(Report{Partial: true, Absent: true})
	await(t, s, "its absence", func(snap Snapshot) bool { return snap.Sources[0].Absent && snap.names()["n/p/a"] })
	src.say(Report{})
	awaitNames(t, s, "its word")
}
