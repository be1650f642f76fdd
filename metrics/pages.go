package metrics

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// pages is the page in the forms that clients accept. All who ask within freshFor get
// the same one: a client in a loop makes the agent read and encode nothing more.
type pages struct {
	from prometheus.Gatherer
	now  func() time.Time
	log  *slog.Logger

	turn     chan struct{} // capacity 1: guards what follows
	taken    time.Time
	families []*dto.MetricFamily
	made     map[form][]byte // of families; as many as there are forms
}

// form is how a page is encoded.
type form struct {
	format expfmt.Format
	zipped bool
}

func newPages(from prometheus.Gatherer, now func() time.Time, log *slog.Logger) *pages {
	return &pages{from: from, now: now, log: log, turn: make(chan struct{}, 1)}
}

func (p *pages) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f := form{expfmt.NegotiateAccept(r.Header, expfmt.DefaultAcceptedFormats()...), strings.Contains(r.Header.Get("Accept-Encoding"), "gzip")}
	ctx, cancel := context.WithTimeout(r.Context(), answerTime)
	defer cancel()
	var page []byte
	read := make(chan error, 1)
	go func() {
		got, err := p.page(ctx, f)
		page = got
		read <- err
	}()
	select {
	case err := <-read:
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	case <-ctx.Done():
		http.Error(w, "the counters cannot be read at present: see the log of the agent", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", string(f.format))
	w.Header().Set("Vary", "Accept, Accept-Encoding")
	if f.zipped {
		w.Header().Set("Content-Encoding", "gzip")
	}
	w.Write(page) // not a copy: as many clients as may connect can be slow to read it
}

// page returns the page of this moment. One caller at a time reads the counters; those
// who wait for it leave when ctx ends, so that a feature that hangs keeps no more than
// one goroutine.
func (p *pages) page(ctx context.Context, f form) ([]byte, error) {
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if now := p.now(); p.made == nil || now.Sub(p.taken) >= freshFor {
		families, err := p.from.Gather()
		if err != nil { // the rest of the page is right
			p.log.Error("metrics page", "err", err)
			if len(families) == 0 {
				return nil, err
			}
		}
		p.taken, p.families, p.made = now, families, make(map[form][]byte)
	}
	page, ok := p.made[f]
	if !ok {
		var err error
		if page, err = encode(p.families, f); err != nil {
			return nil, err
		}
		p.made[f] = page
	}
	return page, nil
}

func encode(families []*dto.MetricFamily, f form) ([]byte, error) {
	var out bytes.Buffer
	to := io.Writer(&out)
	zip := gzip.NewWriter(&out)
	if f.zipped {
		to = zip
	}
	enc := expfmt.NewEncoder(to, f.format)
	var errs []error
	for _, family := range families {
		errs = append(errs, enc.Encode(family))
	}
	if c, ok := enc.(expfmt.Closer); ok {
		errs = append(errs, c.Close())
	}
	if f.zipped {
		errs = append(errs, zip.Close())
	}
	return out.Bytes(), errors.Join(errs...)
}
