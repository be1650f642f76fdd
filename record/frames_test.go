package record

import (
	"encoding/hex"
	"encoding/json"
	"math/rand/v2"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/test/viewtest"
)

// host makes the frames of a host with containers that all work, as they are read again.
type host struct {
	viewtest.Host
	made  int
	taken time.Time
	noise *rand.ChaCha8
}

var epoch = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// newHost returns a host with so many containers, at least 5.
func newHost(containers int) *host {
	return &host{Host: viewtest.Host{Containers: containers, Begin: epoch, Every: 5 * time.Second}, taken: epoch, noise: rand.NewChaCha8([32]byte{})}
}

// next returns the frame after some time, of which a part cannot be compressed.
func (h *host) next(after time.Duration) (f api.Frame) {
	h.made, h.taken = h.made+1, h.taken.Add(after)
	frame, noise := h.Frame(h.made), make([]byte, 64*h.Containers)
	h.noise.Read(noise)
	frame.Containers[4].RuntimeID = hex.EncodeToString(noise)
	data, err := json.Marshal(frame)
	if err == nil {
		err = json.Unmarshal(data, &f)
	}
	if err != nil {
		panic(err) // api.Frame is made for JSON
	}
	f.Taken = h.taken
	return f
}

var must = testkit.Must
