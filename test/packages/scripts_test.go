// Package packages checks the results of `make release`: that packages built elsewhere are the
// same, their content, and what their scripts do. test/e2e checks that they replace a running agent
// under systemd.
package packages

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

var must = testkit.Must

func TestMain(m *testing.M) { testkit.Main(m) }

// alone runs a script of a package with the programs of a folder first in PATH, and with a separate
// /run. systemd runs there unless the first argument is empty.
const alone = `mount -t tmpfs tmpfs /run
[ -z "$1" ] || mkdir -p /run/systemd/system
PATH=$2:$PATH
shift 2
exec "$@"`

// stub is a program that records how it was called. systemctl is-active prints $ACTIVE.
const stub = `#!/bin/sh
echo "${0##*/} $*" >>"$CALLS"
[ "$2" != --quiet ] || exit "$ACTIVE"
`

// TestScripts calls the scripts as deb, rpm and apk do. Only removal stops the agent, and undoes what a
// killed one has left. An upgrade kills a running agent, which leaves everything in force for the next.
func TestScripts(t *testing.T) {
	testkit.NeedRoot(t)
	const (
		group   = "groupadd --system fairlead\n"
		reload  = "systemctl daemon-reload\n"
		active  = "systemctl is-active --quiet fairlead.service\n"
		kill    = "systemctl kill --kill-who=main --signal=KILL fairlead.service\n"
		disable = "systemctl disable --now fairlead.service\n"
		restore = "fairlead restore\n"

		systemd, none = "yes", ""
		up, down      = "0", "3" // statuses of is-active
	)
	dir := t.TempDir()
	for _, name := range []string{"systemctl", "groupadd", "fairlead"} {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(stub), 0o755))
	}
	for _, tt := range []struct {
		name, script            string
		args                    []string
		manager, isActive, want string
	}{
		{"deb installs", "postinstall", []string{"configure", ""}, systemd, down, group + reload + active},
		{"rpm installs", "postinstall", []string{"1"}, systemd, down, group + reload + active},
		{"apk installs", "postinstall", []string{"0.1.0"}, none, down, group},
		{"deb upgrades: before", "preremove", []string{"upgrade", "0.2.0"}, systemd, up, ""},
		{"deb upgrades: after the files", "postremove", []string{"upgrade", "0.2.0"}, systemd, up, reload},
		{"deb upgrades: after", "postinstall", []string{"configure", "0.1.0"}, systemd, up, group + reload + active + kill},
		{"deb does not upgrade after all", "postinstall", []string{"abort-upgrade", "0.2.0"}, systemd, up, ""},
		{"rpm upgrades: after", "postinstall", []string{"2"}, systemd, up, group + reload + active + kill},
		{"rpm upgrades: the old one's files", "preremove", []string{"1"}, systemd, up, ""},
		{"deb upgrades, not running", "postinstall", []string{"configure", "0.1.0"}, systemd, down, group + reload + active},
		{"deb removes", "preremove", []string{"remove"}, systemd, up, disable + restore},
		{"rpm removes", "preremove", []string{"0"}, systemd, up, disable + restore},
		{"apk removes", "preremove", []string{"0.1.0"}, none, down, restore},
		{"deb removes without systemd", "preremove", []string{"remove"}, none, down, restore},
	} {
		t.Run(tt.name, func(t *testing.T) {
			calls := filepath.Join(t.TempDir(), "calls")
			script, err := filepath.Abs("../../packaging/scripts/" + tt.script)
			must(t, err)
			args := append([]string{"--mount", "--propagation", "private", "sh", "-ec", alone, "sh", tt.manager, dir, script}, tt.args...)
			cmd := exec.Command("unshare", args...)
			cmd.Env = append(os.Environ(), "CALLS="+calls, "ACTIVE="+tt.isActive)
			output(t, cmd)
			got, err := os.ReadFile(calls)
			if err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
			if string(got) != tt.want {
				t.Errorf("called\n%swant\n%s", got, tt.want)
			}
		})
	}
}
