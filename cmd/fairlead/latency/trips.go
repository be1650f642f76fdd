package latency

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// roundTrips is the result of a run.
type roundTrips struct {
	Trips     []api.LatencyTrip `json:"round_trips"`
	Unpaired  int               `json:"unpaired_packets"`
	Missed    uint64            `json:"missed_packets"`
	Raw       float64           `json:"raw_p50_seconds"`
	Corrected float64           `json:"corrected_p50_seconds"`
	Why       string            `json:"why,omitempty"` // why there are no round trips
}

// why explains why the records of a program's run contain no round trip.
func (r *latencyRun) why(ctx context.Context, c *api.Client, args []string, records []api.LatencyRecord, unpaired int) string {
	var list []api.Container
	if !r.self {
		list, _ = c.Containers(ctx) // without the list, the reason is less specific
	}
	peers := append([]string{r.peer}, args...)
	for _, rec := range records {
		far := rec.To
		if rec.Direction == "ingress" {
			far = rec.From
		}
		peers = append(peers, far)
	}
	for _, peer := range peers {
		if where := onThisHost(peer, list); where != "" {
			return fmt.Sprintf("%s is %s: what goes there passes no uplink, and this host is all of the way; `fairlead latency` has the times between containers (local)", cli.Show(peer), where)
		}
	}
	partly := 0
	for _, rec := range records {
		if rec.Stack == nil {
			partly++
		}
	}
	switch {
	case len(records) == 0:
		return "no packet of the container was seen while it ran; it sent none, or none that --peer, --port and --protocol select"
	case partly > 0:
		return fmt.Sprintf("%d of %d packets were not measured on their whole way; `fairlead latency` says what is not covered", partly, len(records))
	}
	return fmt.Sprintf("%d packets were seen, and none was answered", unpaired)
}

// onThisHost describes where on this host an address is; "" if it is elsewhere, or is no address.
func onThisHost(peer string, list []api.Container) string {
	addr, err := netip.ParseAddr(peer)
	if err != nil {
		return ""
	}
	for _, o := range list {
		for _, i := range o.Interfaces {
			for _, text := range i.Addrs {
				if p, err := netip.ParsePrefix(text); err == nil && p.Addr() == addr {
					return "container " + cli.Show(o.Name) + " of this host"
				}
			}
		}
	}
	local, _ := net.InterfaceAddrs() // without the addresses, the reason is less specific
	for _, a := range local {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr() == addr {
			return "this host itself"
		}
	}
	return ""
}

func (t roundTrips) table(w io.Writer) {
	if len(t.Trips) == 0 {
		columns.Note(w, "No round trip was measured: "+t.Why+".")
		return
	}
	type row struct {
		api.LatencyTrip
		peer, seq string
	}
	var rows []row
	var sum, mean api.LatencyTrip
	for _, r := range t.Trips {
		rows = append(rows, row{r, cli.Show(r.Peer), fmt.Sprint(r.Seq)})
		sum.Raw, sum.Egress, sum.Ingress, sum.Corrected = sum.Raw+r.Raw, sum.Egress+r.Egress, sum.Ingress+r.Ingress, sum.Corrected+r.Corrected
	}
	n := float64(len(t.Trips))
	mean.Raw, mean.Egress, mean.Ingress, mean.Corrected = sum.Raw/n, sum.Egress/n, sum.Ingress/n, sum.Corrected/n
	mean.Protocol, sum.Protocol = "mean", "sum"
	columns.Print(w, append(rows, row{mean, "", " "}, row{sum, "", " "}),
		columns.Plain("PROTOCOL", func(r row) string { return r.Protocol }),
		columns.Plain("PEER", func(r row) string { return r.peer }).Cut(40),
		columns.Number("SEQ", func(r row) string { return r.seq }),
		columns.Number("RAW", func(r row) string { return fine(r.Raw) }),
		columns.Number("EGRESS", func(r row) string { return fine(r.Egress) }),
		columns.Number("INGRESS", func(r row) string { return fine(r.Ingress) }),
		columns.Number("CORRECTED", func(r row) string { return fine(r.Corrected) }),
	)
	fmt.Fprintf(w, "%d round trips, median %s raw, %s corrected; %d packets without a reply", len(t.Trips), fine(t.Raw), fine(t.Corrected), t.Unpaired)
	if t.Missed > 0 {
		fmt.Fprintf(w, "; %d overwritten before they were read", t.Missed)
	}
	fmt.Fprintln(w)
}
