package blockio

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/view"
)

// blockioDetail prints how the watched containers competed for CPUs, and what interrupted
// the CPUs.
func blockioDetail(w io.Writer, b api.BlockIO) {
	names := make(map[api.ID]string)
	watched := slices.DeleteFunc(slices.Clone(b.Rows), func(r api.BlockIORow) bool {
		_, seen := names[r.Container] // its rows for other disks are the same
		names[r.Container] = r.Name
		return seen || r.Container == 0 || r.Voluntary+r.Involuntary == 0 && r.CPUPressure == 0
	})
	columns.Below(w, watched,
		columns.Text("CONTAINER", func(r api.BlockIORow) string { return r.Name }).Cut(24),
		columns.Text("VOLUNTARY", func(r api.BlockIORow) string { return view.Scale(float64(r.Voluntary)) }),
		columns.Text("INVOLUNTARY", func(r api.BlockIORow) string { return view.Scale(float64(r.Involuntary)) }),
		columns.Text("I_CPU", func(r api.BlockIORow) string { return two(r.ICPU) }),
		columns.Text("OF OTHERS", func(r api.BlockIORow) string { return two(r.ICPUForeign) }),
		columns.Text("OF ITSELF", func(r api.BlockIORow) string { return two(r.ICPUOwn) }),
		columns.Text("WAITED FOR OTHERS", func(r api.BlockIORow) string { return quantile(r.WaitForeign) }),
		columns.Text("CPU PRESSURE", func(r api.BlockIORow) string { return percent(r.CPUPressure) }),
		columns.Text("IO PRESSURE", func(r api.BlockIORow) string { return percent(r.IOPressure) }),
		columns.Text("THROTTLED", func(r api.BlockIORow) string { return quantile(r.Throttled) }),
	)
	columns.Below(w, b.Waits,
		columns.Text("WAITED", func(x api.BlockIOWait) string { return names[x.Victim] }).Cut(24),
		columns.Text("WHILE THERE RAN", func(x api.BlockIOWait) string { return x.Name }).Cut(24),
		columns.Text("IN EACH SECOND", func(x api.BlockIOWait) string { return view.Brief(x.Share) }),
	)
	columns.Below(w, b.Threads,
		columns.Text("THREAD", func(t api.BlockIOThread) string { return strconv.Itoa(t.TID) }),
		columns.Text("VOLUNTARY", func(t api.BlockIOThread) string { return strconv.FormatUint(t.Voluntary, 10) }),
		columns.Text("INVOLUNTARY", func(t api.BlockIOThread) string { return strconv.FormatUint(t.Involuntary, 10) }),
	)
	columns.Below(w, b.Interrupts,
		columns.Text("SOURCE", func(i api.BlockIOInterrupts) string { return i.Source }),
		columns.Text("KIND", func(i api.BlockIOInterrupts) string {
			switch {
			case i.Soft:
				return "softirq"
			case i.Number > 0:
				return "interrupt " + strconv.Itoa(i.Number)
			}
			return "interrupt"
		}),
		columns.Plain("PER SECOND, BY CPU", func(i api.BlockIOInterrupts) string {
			var each []string
			for _, n := range i.CPUs {
				each = append(each, view.Scale(n))
			}
			return strings.Join(each, " ")
		}),
	)
	if b.Stolen > 0.005 {
		fmt.Fprintf(w, "\nThe hypervisor let CPUs wait for %s in each second.\n", view.Brief(b.Stolen))
	}
}

func two(n float64) string { return columns.If(n != 0, strconv.FormatFloat(n, 'f', 2, 64)) }

func percent(part float64) string { return fmt.Sprintf("%.0f %%", 100*part) }
