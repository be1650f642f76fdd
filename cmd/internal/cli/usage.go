package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/api"
)

// The exit statuses. Root's help documents them.
const (
	Done   = 0
	Failed = 1
	Usage  = 2
)

const statusHelp = `Exit status: 0 if it was done; 1 if it failed, was interrupted, or holds only in
part; 2 if the command line is wrong.`

// UsageError is an error in the command line.
type UsageError struct{ error }

func (e UsageError) Unwrap() error { return e.error }

// Usagef makes a UsageError.
func Usagef(format string, args ...any) error { return UsageError{fmt.Errorf(format, args...)} }

// flagError says in words what is wrong with a flag.
func flagError(_ *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		return Usagef("--%s %q: %s", invalid.GetFlag().Name, invalid.GetValue(), Refusal(invalid.GetFlag(), invalid.Unwrap()))
	}
	return UsageError{err}
}

// Refusal says why a flag does not take a value.
func Refusal(f *pflag.Flag, err error) string {
	switch f.Value.Type() {
	case "duration":
		return "want a time, as 500ms, 2s or 1m"
	case "bool":
		return "want true or false"
	case "float64":
		return "want a number"
	case "int", "int64":
		return "want a whole number"
	case "uint", "uint32":
		return "want a whole number, not below 0"
	case "uint16":
		return "want a whole number, 0 to 65535"
	}
	return api.Text(err)
}

// Unknown is the error for a word that is no verb of cmd, with those that may be meant.
func Unknown(cmd *cobra.Command, what, word string) error {
	cmd.SuggestionsMinimumDistance = 2
	near := cmd.SuggestionsFor(word) // also by SuggestFor: what other tools call it
	if len(near) == 0 {
		return Usagef("unknown %s %q", what, word)
	}
	return Usagef("unknown %s %q; did you mean %s?", what, word, strings.Join(near, " or "))
}

// NArgs checks the number of arguments, and returns a UsageError.
func NArgs(low, high int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		got := strings.Trim(fmt.Sprintf("%q", args), "[]")
		switch {
		case len(args) < low:
			return Usagef("%s is missing", what)
		case len(args) > high && high == 0:
			return Usagef("takes no argument, got %s", got)
		case len(args) > high:
			return Usagef("takes %s only, got %s", what, got)
		}
		return nil
	}
}
