package bench

import (
	"context"
	"errors"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// dueOfMail is the reservation of the mail server, as a fraction of its undisturbed throughput. It
// is more than in MIST's figure 9 (3000 of 4000 to 6000), because the neighbours here leave the
// mail server three quarters of its throughput, and MIST's left it less than 3000.
const dueOfMail = 0.85

// mail is figure 9: a mail server alone, beside containers that decode and send streams, and beside
// them with a reservation.
func (r *blockioRig) mail(ctx context.Context, _ blockioCase, a arm) (_ []figure, err error) {
	settle := blockioSettle
	switch a {
	case armAlone:
		r.alone, r.due, err = r.undisturbed(ctx, 2*r.take)
		return nil, err
	case armOn:
		settle = 5 * time.Second
		// The kernel merges several blocks into one request, and the reservation counts requests.
		end, err := r.reserve(ctx, r.db.Name, scaled(api.BlockIOFigures{ReadIOPS: r.due.ReadIOPS, WriteIOPS: r.due.WriteIOPS}, dueOfMail))
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, end()) }()
	}
	w, err := r.disturbed(ctx, settle, r.take)
	if err != nil {
		return nil, err
	}
	return []figure{{PartOfDue, "1", w.rate / (dueOfMail * r.alone.rate)}, r.longer(w)}, nil
}
