// Package marks reads from the source of the tests which of them depend on the
// kernel, and what they cover: the calls of testkit.Smoke and testkit.OnKernels.
// It runs no test. test/vm goes by it to choose what a guest runs, test/rules to
// see that nothing is left out.
package marks
