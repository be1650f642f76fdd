package main

import (
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/api"
)

// A feature that is unavailable counts for who asks for it, whatever its keys
// are called.
func TestStandingUnavailable(t *testing.T) {
	c := api.Container{Features: []api.FeatureStatus{{Feature: "traffic", State: api.StateUnavailable, Error: "no HTB"}, {Feature: "netcpu", State: api.StateDone}}}
	if word, trouble := standing(c); word != api.StateDone || trouble != nil {
		t.Errorf("not asked for: %q, %q", word, trouble)
	}
	c.Policy = []api.Setting{{Key: "fairlead.net.rate", Value: "1mbit", From: "label"}}
	if word, trouble := standing(c); word != api.StateUnavailable || !slices.Equal(trouble, []string{"traffic: unavailable: no HTB"}) {
		t.Errorf("asked for: %q, %q", word, trouble)
	}
}
