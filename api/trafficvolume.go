package api

import (
	"context"
	"net/http"
	"net/url"
	"time"
)

// Volumes returns what containers have sent and received, by day and month: in all accounts if of
// is "", or in one, with its earlier days and months. of is the name of an account, or a container
// as for Explain.
func (c *Client) Volumes(ctx context.Context, of string) (out Volumes, err error) {
	path := "/v1/traffic/volumes"
	if of != "" {
		path += "?" + url.Values{"of": {of}}.Encode()
	}
	return out, c.do(ctx, http.MethodGet, path, nil, &out)
}

// VolumesAsk is the Body of an [Ask] for volumes.
type VolumesAsk struct {
	Of string // as for [Client.Volumes]
}

// Volumes is what containers have sent and received, over all their restarts.
type Volumes struct {
	Taken    time.Time `json:"taken" doc:"when the counters were read, some seconds ago at most"`
	Zone     string    `json:"zone" doc:"time zone of days and months"`
	Accounts []Volume  `json:"accounts" doc:"one element for each account, sorted by name"`
}

// Volume is the account of one container, or of those that share a network.
type Volume struct {
	Account   string         `json:"account" doc:"RUNTIME/NAME of the container, or pod/NAMESPACE/NAME of the pod"`
	Container ID             `json:"container,omitempty,string" doc:"id of the container that runs; the lowest of several; absent if none does"`
	First     time.Time      `json:"first" doc:"when counting began"`
	Last      time.Time      `json:"last" doc:"when it was last in use, to the hour if nothing passed"`
	Total     VolumeBytes    `json:"total" doc:"all since then"`
	Day       VolumeBytes    `json:"day" doc:"in the present day"`
	Month     VolumeBytes    `json:"month" doc:"in the present month"`
	Limits    []VolumeLimit  `json:"limits,omitempty" doc:"the volumes of policy, one for each container that has one"`
	Days      []VolumePeriod `json:"days,omitempty" doc:"days with traffic, the latest first; of one account only"`
	Months    []VolumePeriod `json:"months,omitempty" doc:"months with traffic, the latest first; of one account only"`
}

// VolumeBytes is a number of bytes in each direction, as the kernel counts them at the devices:
// with link headers, and a super-packet has one.
type VolumeBytes struct {
	Sent     uint64 `json:"sent_bytes" doc:"bytes that the container sent"`
	Received uint64 `json:"received_bytes" doc:"bytes that it received"`
}

// VolumePeriod is one day or month.
type VolumePeriod struct {
	Period string `json:"period" doc:"as 2006-01-02 or 2006-01"`
	VolumeBytes
}

// VolumeLimit is a volume that policy sets.
type VolumeLimit struct {
	Container ID        `json:"container,string" doc:"id of the container with the policy"`
	Volume    string    `json:"volume" doc:"as of the key net.volume"`
	Bytes     uint64    `json:"bytes" doc:"the volume"`
	Used      uint64    `json:"used_bytes" doc:"bytes that count for it in this period"`
	Until     time.Time `json:"until" doc:"end of this period"`
	After     uint64    `json:"after_bits_per_second,omitempty" doc:"ceil in the directions that count while it is used up; absent if there is none"`
}
