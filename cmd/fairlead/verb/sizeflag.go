package verb

import (
	"github.com/fairlead-project/fairlead/policy"
)

// sizeFlag is a flag whose value is a number of bytes, in the units of policy.
type sizeFlag int64

func (s *sizeFlag) Set(text string) error {
	n, err := policy.ParseSize(text)
	if err != nil {
		return err
	}
	*s = sizeFlag(min(n, 1<<50))
	return nil
}

func (s *sizeFlag) String() string { return policy.FormatSize(uint64(*s)) }

func (s *sizeFlag) Type() string { return "size" }
