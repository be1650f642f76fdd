package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
)

// volumeStub returns the accounts, and remembers what was asked.
type volumeStub struct {
	serve.Backend
	volumes api.Volumes
	asked   any
}

func (s *volumeStub) Report(_ context.Context, ask api.Ask) (any, error) {
	s.asked = ask.Body
	return s.volumes, nil
}

func TestTrafficVolume(t *testing.T) {
	at := time.Date(2026, 11, 26, 8, 0, 0, 0, time.UTC)
	both := func(sent, received uint64) api.VolumeBytes { return api.VolumeBytes{Sent: sent, Received: received} }
	s := &volumeStub{volumes: api.Volumes{Taken: at, Zone: "UTC", Accounts: []api.Volume{
		{Account: "docker/game\x1b", Container: 7, Total: both(9e12, 1e12), Day: both(1e9, 5e8), Month: both(2e11, 1e11),
			Limits: []api.VolumeLimit{{Container: 7, Volume: "500gb/month", Bytes: 500e9, Used: 300e9, After: 1e6}, {Container: 8, Volume: "500gb/month", Bytes: 500e9, Used: 300e9, After: 1e6}}},
		{Account: "pod/shop/web-0", Total: both(1, 2)},
	}}}
	status, out, errs := against(t, s, "traffic", "volume")
	const want = `ACCOUNT            RUNS   TODAY  MONTH SENT  RECEIVED   TOTAL  VOLUME                   USED
"docker/game\x1b"  yes   1.50GB       200GB     100GB  10.0TB  500gb/month, then 1mbit  60.0 %
pod/shop/web-0     no        0B          0B        0B      3B  -                        -

Days and months in UTC, as of 2026-11-26 08:00:00 UTC
`
	if diff := cmp.Diff(want, out); status != 0 || errs != "" || diff != "" || s.asked != (api.VolumesAsk{}) {
		t.Errorf("status %d, %q, asked %+v: %s", status, errs, s.asked, diff)
	}
	s.volumes.Accounts = s.volumes.Accounts[1:]
	s.volumes.Accounts[0].Months = []api.VolumePeriod{{Period: "2026-11", VolumeBytes: both(1, 1)}, {Period: "2026-10", VolumeBytes: both(0, 1)}}
	status, out, errs = against(t, s, "traffic", "volume", "pod/shop/web-0")
	if status != 0 || errs != "" || s.asked != (api.VolumesAsk{Of: "pod/shop/web-0"}) || !strings.Contains(out, "\nMONTH    SENT  RECEIVED  BOTH\n2026-11    1B        1B    2B\n2026-10    0B        1B    1B\n") {
		t.Errorf("status %d, %q, asked %+v:\n%s", status, errs, s.asked, out)
	}
	s.volumes.Accounts = nil
	if status, out, _ = against(t, s, "traffic", "volume"); status != 0 || out != "Nothing has been counted yet.\n" {
		t.Errorf("status %d: %q", status, out)
	}
	if status, _, _ = against(t, s, "traffic", "volume", ""); status != 2 {
		t.Errorf("no name: status %d", status)
	}
}
