package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/prometheus/procfs"
)

// Service is a real server program from Debian. Ask starts its clients.
type Service string

// The services. Each answers with one thread or one process.
const (
	Redis     Service = "redis"
	Memcache  Service = "memcached"
	Nginx     Service = "nginx"
	Postgres  Service = "postgres"
	serveUser         = "postgres"
)

// The port on which a service listens.
const (
	Port       = port
	PortNumber = 9000
)

// The sizes of answers that Ask may request from Nginx, in bytes. Other services answer with any size.
const (
	PageSize  = 1000
	LargePage = 1 << 20
)

// Package is the Debian package of a service.
func (s Service) Package() string {
	if s == Postgres {
		return "postgresql"
	}
	return string(s)
}

// Program returns the path of a service's program, or "" if it is not installed.
func (s Service) Program() string {
	name := string(s)
	switch s {
	case Redis:
		name = "redis-server"
	case Postgres: // Debian installs one per version, outside PATH
		if found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres"); len(found) > 0 {
			return found[len(found)-1]
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return ""
	}
	return path
}

// Proto returns rr-client's name for the protocol of a service.
func (s Service) Proto() string {
	if s == Nginx {
		return "http"
	}
	return string(s)
}

// Serve starts a service in one of the rig's sandboxes, and waits until it listens at Port. Its data
// are in a TempDir.
func (r *Rig) Serve(ctx context.Context, s Service, box *sandbox.Box) (*Generator, error) {
	dir, err := r.TempDir(fmt.Sprintf("%s-%d", s, len(r.temp)))
	if err != nil {
		return nil, err
	}
	program := s.Program()
	if program == "" {
		return nil, fmt.Errorf("run %s: %w", s, exec.ErrNotFound)
	}
	var args []string
	switch s {
	case Redis:
		args = []string{"--port", port, "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", dir}
	case Memcache:
		args = []string{"-u", "root", "-p", port, "-U", "0", "-t", "1", "-m", "64", "-l", "0.0.0.0"}
	case Nginx:
		args = []string{"-p", dir, "-e", os.DevNull, "-c", filepath.Join(dir, "nginx.conf")}
		err = os.WriteFile(filepath.Join(dir, "nginx.conf"), fmt.Appendf(nil, nginxConfig, dir, port, dir), 0o644)
		for _, size := range []int{PageSize, LargePage} { // a page is named after its size
			err = errors.Join(err, os.WriteFile(filepath.Join(dir, strconv.Itoa(size)), make([]byte, size), 0o644))
		}
	case Postgres:
		program, args, err = postgres(program, dir)
	default:
		err = fmt.Errorf("no such service: %q", s)
	}
	if err != nil {
		return nil, err
	}
	p, err := box.Start(exec.Command(program, args...), r.cpusOf(box)...)
	if err != nil {
		return nil, err
	}
	g := &Generator{Process: p}
	r.load = append(r.load, g)
	if err := await(ctx, p, func() bool { return atPort(p.PID, listening) }); err != nil || s != Postgres {
		return g, err
	}
	// PostgreSQL listens before it accepts clients, and logs when it does.
	return g, await(ctx, p, func() bool {
		note, err := os.ReadFile(filepath.Join(dir, "data", "postmaster.pid"))
		return err == nil && strings.Contains(string(note), "ready")
	})
}

// nginxConfig runs one process that never closes a connection and logs nothing.
const nginxConfig = `
daemon off;
user root;
master_process off;
pid %s/pid;
events {}
http {
	access_log off;
	keepalive_requests 1000000000;
	server { listen %s; root %s; }
}
`

// postgres creates a database in dir and returns the command that serves it. The command drops root,
// because PostgreSQL refuses to run as root.
func postgres(program, dir string) (string, []string, error) {
	u, err := user.Lookup(serveUser)
	if err != nil {
		return "", nil, fmt.Errorf("run postgres: %w", err)
	}
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	if err := os.Chown(dir, uid, gid); err != nil {
		return "", nil, err
	}
	setpriv, err := exec.LookPath("setpriv")
	if err != nil {
		return "", nil, fmt.Errorf("run postgres: %w", err)
	}
	as := []string{"--reuid", u.Uid, "--regid", u.Gid, "--clear-groups"}
	data := filepath.Join(dir, "data")
	initdb := append(append([]string{}, as...), filepath.Join(filepath.Dir(program), "initdb"), "--no-sync", "-A", "trust", "-D", data)
	if out, err := exec.Command(setpriv, initdb...).CombinedOutput(); err != nil {
		return "", nil, fmt.Errorf("make a database: %w: %s", err, strings.TrimSpace(string(out)))
	}
	trust := "host all all 10.0.0.0/8 trust\nhost all all 127.0.0.0/8 trust\n"
	if err := os.WriteFile(filepath.Join(data, "pg_hba.conf"), []byte(trust), 0o600); err != nil {
		return "", nil, err
	}
	return setpriv, append(as, program, "-D", data, "-p", port, "-c", "listen_addresses=0.0.0.0", "-c", "unix_socket_directories="), nil
}

// Ask starts a client in one of the rig's sandboxes, for the service in the container with index server.
// Each of its conns connections waits for an answer of size bytes before it asks again. The client
// starts paused.
func (r *Rig) Ask(ctx context.Context, s Service, server int, client *sandbox.Box, conns, size int) (*Generator, error) {
	return r.Start(ctx, client, "rr-client", "--proto", s.Proto(), "--size", strconv.Itoa(size),
		"--conns", strconv.Itoa(conns), "--to", r.At(server, PortNumber), "--rate", "0")
}

// Connected reports whether the service of a process still has a connection. The client may have gone
// and left answers that the kernel retransmits.
func Connected(pid int) bool { return atPort(pid, connected) }

// Retransmitted returns the number of TCP segments that the network namespaces of some processes have
// retransmitted.
func Retransmitted(pids ...int) (sum uint64, err error) {
	for _, pid := range pids {
		p, err := procfs.NewProc(pid)
		if err != nil {
			return 0, err
		}
		counts, err := p.Snmp()
		if err != nil || counts.RetransSegs == nil {
			return 0, errors.Join(err, fmt.Errorf("no segments of TCP in /proc/%d/net/snmp", pid))
		}
		sum += uint64(*counts.RetransSegs)
	}
	return sum, nil
}

// atPort reports whether the network namespace of a process has a TCP socket at the rig's port for
// which in returns true.
func atPort(pid int, in func(state string) bool) bool {
	for _, table := range []string{"tcp", "tcp6"} {
		data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table)) // a host may have no IPv6
		for line := range strings.Lines(string(data)) {
			f := strings.Fields(line) // sl local_address rem_address st
			if len(f) > 3 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", PortNumber)) && in(f[3]) {
				return true
			}
		}
	}
	return false
}

// await waits until a server is ready.
func await(ctx context.Context, p *sandbox.Process, ready func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := load.Await(ctx, p.Done(), ready); err != nil {
		return fmt.Errorf("wait for a server to listen: %w", err)
	}
	return nil
}

// The states of a socket, as in the kernel's tcp_states.h.
func listening(state string) bool { return state == "0A" }
func connected(state string) bool { return state != "0A" && state != "06" } // TIME_WAIT
