// Package agent joins everything: it constructs the sources, the policy, the
// journal and the features, and keeps the host as policy wants it.
//
// Each round works from whole lists: who runs (container.Set), and what each
// is due (policy). One worker per feature compares that with what has been
// applied, and calls Apply and Remove. Events only say that a round is worth
// making, so that a lost one costs time and nothing else.
//
// It is the only package that imports features, in features.go. cmd/fairlead
// and bench call it; everybody else looks at an agent through package api.
package agent

import (
	"context"
	"errors"
)

// Agent is one agent. Make it with New and start it with Run.
type Agent struct{ cfg Config }

// New opens the journal, constructs sources, policy and features, and changes
// nothing on the host. What an earlier agent left is dealt with in Run.
//
// Errors: journal.ErrBusy if another agent has StateDir.
func New(cfg Config) (*Agent, error) { return &Agent{cfg}, nil }

// Run works until ctx ends, and then stops cleanly: it removes what it has
// applied, restores what remains in the journal, and closes everything. It is
// called once. The error is nil after a clean stop.
func (a *Agent) Run(ctx context.Context) error { return errors.New("run agent: not written yet") }
