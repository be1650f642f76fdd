package container

import (
	"context"
	"time"
)

const (
	minBackOff = 50 * time.Millisecond
	maxBackOff = 2 * time.Second
)

// retry runs session again and again until ctx ends, after a pause that
// doubles while sessions end at once.
func retry(ctx context.Context, session func(context.Context)) {
	pause := minBackOff
	for ctx.Err() == nil {
		start := time.Now()
		session(ctx)
		if time.Since(start) > maxBackOff {
			pause = minBackOff
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, maxBackOff)
	}
}
