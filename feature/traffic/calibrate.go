package traffic

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// MaxCalibration is the longest that Calibrate sends.
const MaxCalibration = 10 * time.Second

// Calibrated is a rate that Calibrate measured.
type Calibrated struct {
	Rate uint64    `json:"rate"` // bit/s, frames with their headers
	MAC  string    `json:"mac"`  // of the device; a new device of the same name has its own rate
	When time.Time `json:"when"`
	To   string    `json:"to"`
}

// flows is the number of connections of Calibrate. A single one may be limited by its window.
const flows = 4

// Calibrate measures the rate of the uplink that leads to an address (HOST:PORT), where a receiver
// has to listen, and records it in cfg.Measured, which New's features read. It sends as much TCP as
// the link carries for the time over, which all hosts on the path notice, and counts the bytes that
// the device sends after the first third. It changes nothing on the host. It fails while our own
// shaper limits the link to a rate measured before.
func Calibrate(ctx context.Context, cfg Config, to string, over time.Duration) (device string, c Calibrated, err error) {
	if over <= 0 || over > MaxCalibration {
		return "", c, fmt.Errorf("calibrate: the time has to be more than 0 and at most %v", MaxCalibration)
	}
	f := &Traffic{cfg: cfg.withDefaults()}
	if f.host, err = netdev.Open(f.cfg.NetNS); err != nil {
		return "", c, fmt.Errorf("calibrate: %w", err)
	}
	defer f.host.Close()
	uplinks, err := f.host.Links(netdev.MostLinks)
	if err != nil {
		return "", c, fmt.Errorf("calibrate: %w", err)
	}
	all := slices.Clone(uplinks)
	uplinks = slices.DeleteFunc(uplinks, func(l netdev.Link) bool { return !f.isUplink(l, all) })
	if len(uplinks) == 0 {
		return "", c, errors.New("calibrate: the host has no uplink (--uplink names one)")
	}
	for _, l := range uplinks {
		if _, known := f.calibrated(l); !known {
			continue
		}
		if v, err := qdisc.Root(f.host, l.Index).Read(); err == nil && (v == qdisc.Ours(qdisc.KindHTB) || v == qdisc.Ours(qdisc.KindHFSC)) {
			return "", c, fmt.Errorf("calibrate: the agent holds %s to the rate that was measured before: stop it first", l.Name)
		}
	}
	sent, took, err := f.flood(ctx, uplinks, to, over)
	if err != nil {
		return "", c, fmt.Errorf("calibrate: %w", err)
	}
	by := slices.MaxFunc(uplinks, func(a, b netdev.Link) int { return cmp.Compare(sent[a.Index], sent[b.Index]) })
	c = Calibrated{Rate: round(uint64(float64(sent[by.Index]) * 8 / took.Seconds())), MAC: by.MAC, When: time.Now().UTC().Truncate(time.Second), To: to}
	if c.Rate < minCalibrated {
		return "", c, fmt.Errorf("calibrate: what was sent to %s has left by no uplink", to)
	}
	return by.Name, c, f.note(by.Name, c)
}

// round rounds a rate down to three digits, the precision of the measurement.
func round(rate uint64) uint64 {
	unit := uint64(1)
	for rate/unit >= 1000 {
		unit *= 10
	}
	return rate / unit * unit
}

// flood sends to an address for a time. It returns how many bytes each device sent after the first
// third, and the length of the rest.
func (f *Traffic) flood(ctx context.Context, devices []netdev.Link, to string, over time.Duration) (sent map[int]uint64, took time.Duration, err error) {
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for range flows {
		d := net.Dialer{Timeout: dialTime}
		c, err := d.DialContext(ctx, "tcp", to)
		if err != nil {
			return nil, 0, fmt.Errorf("%w (somebody has to take in what is sent there: `fairlead traffic calibrate --listen`)", err)
		}
		conns = append(conns, c)
	}
	ctx, cancel := context.WithTimeout(ctx, over)
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		for _, c := range conns {
			c.SetDeadline(time.Now())
		}
	})
	defer stop()
	var sending sync.WaitGroup
	for _, c := range conns {
		sending.Go(func() { io.Copy(c, endless{}) }) // until ctx ends, or the other end closes
	}
	select { // while TCP finds out
	case <-time.After(over / 3):
	case <-ctx.Done():
	}
	was, from := make(map[int]netdev.Counters), time.Now()
	for _, l := range devices {
		if was[l.Index], err = f.host.Counters(l.Index); err != nil {
			return nil, 0, err
		}
	}
	sending.Wait()
	if ctx.Err() == nil {
		return nil, 0, fmt.Errorf("%s has closed the connections", to)
	}
	if errors.Is(context.Cause(ctx), context.Canceled) {
		return nil, 0, context.Canceled
	}
	sent, took = make(map[int]uint64), time.Since(from)
	for _, l := range devices {
		now, err := f.host.Counters(l.Index)
		if err != nil {
			return nil, 0, err
		}
		sent[l.Index] = now.TxBytes - was[l.Index].TxBytes
	}
	return sent, took, nil
}

// dialTime is how long Calibrate waits for an answer.
const dialTime = 10 * time.Second

// minCalibrated is the least rate that counts as measured, bit/s. Other traffic alone may reach
// less.
const minCalibrated = 100_000

// endless reads zeros.
type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }

// maxMeasured limits the size of the file of measured rates, in bytes.
const maxMeasured = 64 << 10

// measured reads the measured rates by device; a missing file is empty.
func (c Config) measured() (map[string]Calibrated, error) {
	if c.Measured == "" {
		return nil, nil
	}
	file, err := os.Open(c.Measured)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("rates that were measured: %w", err)
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxMeasured))
	if err != nil {
		return nil, fmt.Errorf("rates that were measured: %w", err)
	}
	m, err := parseMeasured(data)
	if err != nil {
		return nil, fmt.Errorf("rates that were measured: %s: %w", c.Measured, err)
	}
	return m, nil
}

func parseMeasured(data []byte) (map[string]Calibrated, error) {
	var m map[string]Calibrated
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, err
	}
	for dev, c := range m {
		if c.Rate < minCalibrated || c.Rate > fastestCalibrated {
			return nil, fmt.Errorf("%q: impossible rate %d", dev, c.Rate)
		}
	}
	return m, nil
}

// fastestCalibrated is more than any host sends, bit/s.
const fastestCalibrated = 1e15

// calibrated returns the measured rate of a device.
func (f *Traffic) calibrated(l netdev.Link) (Calibrated, bool) {
	all, err := f.cfg.measured()
	if err != nil {
		f.cfg.Log.Warn("going on without", "err", err)
	}
	c, known := all[l.Name]
	return c, known && c.MAC == l.MAC
}

// note records the measured rate of a device.
func (f *Traffic) note(device string, c Calibrated) error {
	all, err := f.cfg.measured()
	if err != nil || all == nil { // an unreadable file is replaced
		all = make(map[string]Calibrated)
	}
	all[device] = c
	data, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	path := f.cfg.Measured
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("note what was measured: %w", err)
	}
	if err := os.WriteFile(path+".next", append(data, '\n'), 0o644); err != nil {
		return fmt.Errorf("note what was measured: %w", err)
	}
	if err := os.Rename(path+".next", path); err != nil {
		return fmt.Errorf("note what was measured: %w", err)
	}
	return nil
}
