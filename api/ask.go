package api

import "time"

// Ask is what somebody wants to know of a feature.
type Ask struct {
	Feature   string        // its name
	Container string        // id, runtime id or name of one container; "": all
	Over      time.Duration // measure for so long first; 0: do not
	Self      bool          // the container itself asks
	Body      any           // a command, or what a route makes of its parameters, with the type that it declares; else nil
}

// MaxOver is the longest time over which an agent measures for one request.
const MaxOver = 30 * time.Second
