package record

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// Choice says what Export writes.
type Choice struct {
	From, To  time.Time // as of Reader.Frames
	Anonymous bool      // without names, images, labels, paths, addresses and ids of runtimes
	Words     []string  // with Anonymous: words beside those of this package that stay, such as keys of policy
}

// Exported is what Export has written.
type Exported struct {
	Frames      int
	First, Last time.Time // of the frames, in the order of recording
	Damaged     int       // parts of the recording that could not be read
}

// Export writes frames of a recording to out, in the form of one file that Open reads. After an error
// what was written is of no use.
func (r *Reader) Export(out io.Writer, c Choice) (done Exported, err error) {
	var b blocks
	hide := newAnonymous(c.Words)
	for f, err := range r.Frames(c.From, c.To, 0) {
		if errors.Is(err, ErrDamaged) {
			done.Damaged++
			continue
		}
		if err != nil {
			return done, err
		}
		if c.Anonymous {
			f = hide.frame(f)
		}
		data, err := b.frame(f, done.Frames == 0)
		if err == nil {
			_, err = out.Write(data)
		}
		if err != nil {
			return done, fmt.Errorf("export recording: %w", err)
		}
		if done.Frames == 0 {
			done.First = f.Taken
		}
		done.Frames, done.Last = done.Frames+1, f.Taken
	}
	return done, nil
}
