package traffic

import (
	"encoding/json"
	"testing"
)

func FuzzMeasured(f *testing.F) {
	f.Add([]byte(`{"eth0": {"rate": 941000000, "mac": "02:00:00:00:00:01", "when": "2026-11-23T16:00:00Z", "to": "192.0.2.7:9999"}}`))
	f.Add([]byte(`{"eth0": {"rate": 0}}`))
	f.Add([]byte(`{"eth0": {"rate": 18446744073709551615}}`))
	f.Add([]byte(`[]`))
	f.Add([]byte(``))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := parseMeasured(data)
		if err != nil {
			return
		}
		for dev, c := range m {
			if c.Rate < minCalibrated || c.Rate > fastestCalibrated {
				t.Errorf("%q: %+v", dev, c)
			}
		}
		if _, err := json.Marshal(m); err != nil {
			t.Error(err)
		}
	})
}
