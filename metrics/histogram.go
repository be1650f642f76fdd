package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/fairlead-project/fairlead/hist"
)

// both is one metric with the classic and the native form of a histogram. The text page has
// the classic form, and a scrape by protobuf has both.
type both struct {
	prometheus.Metric // the classic form
	native            prometheus.Metric
}

func newHistogram(desc *prometheus.Desc, of *hist.Forms, values []string) (prometheus.Metric, error) {
	buckets := make(map[float64]uint64, len(of.Classic.Buckets))
	for _, b := range of.Classic.Buckets {
		buckets[b.Le] = b.Count
	}
	classic, err := prometheus.NewConstHistogram(desc, of.Classic.Count, of.Classic.Sum, buckets, values...)
	if err != nil || of.Native == nil {
		return classic, err
	}
	n := of.Native
	native, err := prometheus.NewConstNativeHistogram(desc, n.Count, n.Sum, n.Positive, nil, n.Zero, n.Schema,
		prometheus.DefNativeHistogramZeroThreshold, time.Time{}, values...)
	return both{classic, native}, err
}

// Write implements prometheus.Metric.
func (b both) Write(out *dto.Metric) error {
	if err := b.Metric.Write(out); err != nil {
		return err
	}
	var native dto.Metric
	if err := b.native.Write(&native); err != nil {
		return err
	}
	h, n := out.Histogram, native.Histogram
	h.Schema, h.ZeroThreshold, h.ZeroCount = n.Schema, n.ZeroThreshold, n.ZeroCount
	h.PositiveSpan, h.PositiveDelta = n.PositiveSpan, n.PositiveDelta
	return nil
}
