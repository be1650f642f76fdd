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

	"github.com/fairlead-project/fairlead/sandbox"
)

// Service is a real server program of Debian's, as it is asked by Ask.
type Service string

// The services. Each uses one thread, or one process, to answer.
const (
	Redis     Service = "redis"
	Memcache  Service = "memcached"
	Nginx     Service = "nginx"
	Postgres  Service = "postgres"
	pageSize          = 1000 // bytes in each answer
	serveUser         = "postgres"
)

// Program finds the program of a service; "" if it is not installed.
func (s Service) Program() string {
	name := string(s)
	switch s {
	case Redis:
		name = "redis-server"
	case Postgres: // Debian keeps it apart, by version
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

// proto is what rr-client calls the protocol of a service.
func (s Service) proto() string {
	if s == Nginx {
		return "http"
	}
	return string(s)
}

// Serve starts a service in the i-th container and waits until it listens.
func (r *Rig) Serve(ctx context.Context, s Service, i int) (*sandbox.Process, error) {
	program, box := s.Program(), r.Boxes[i]
	if program == "" {
		return nil, fmt.Errorf("run %s: %w", s, exec.ErrNotFound)
	}
	dir, err := r.TempDir(fmt.Sprintf("%s-%d", s, len(r.temp)))
	if err != nil {
		return nil, err
	}
	var args []string
	switch s {
	case Redis:
		args = []string{"--port", port, "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", dir}
	case Memcache:
		args = []string{"-u", "root", "-p", port, "-U", "0", "-t", "1", "-m", "64", "-l", "0.0.0.0"}
	case Nginx:
		args = []string{"-p", dir, "-e", os.DevNull, "-c", filepath.Join(dir, "nginx.conf")}
		err = errors.Join(
			os.WriteFile(filepath.Join(dir, "nginx.conf"), fmt.Appendf(nil, nginxConfig, dir, port, dir), 0o644),
			os.WriteFile(filepath.Join(dir, "index.html"), make([]byte, pageSize), 0o644))
	case Postgres:
		program, args, err = r.postgres(program, dir)
	default:
		err = fmt.Errorf("no such service: %q", s)
	}
	if err != nil {
		return nil, err
	}
	p, err := r.launch(box, program, args...)
	if err != nil {
		return nil, err
	}
	if err := listens(ctx, p); err != nil || s != Postgres {
		return p, err
	}
	// It listens before it lets anybody in, and notes when it does.
	return p, await(ctx, p, func() bool {
		note, err := os.ReadFile(filepath.Join(dir, "data", "postmaster.pid"))
		return err == nil && strings.Contains(string(note), "ready")
	})
}

// nginxConfig has one process that never closes a connection, and writes nothing.
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

// postgres makes a database in dir, and returns how to serve it: not as root, which it
// refuses.
func (r *Rig) postgres(program, dir string) (string, []string, error) {
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
	trust := "host all all 10.111.0.0/24 trust\n"
	if err := os.WriteFile(filepath.Join(data, "pg_hba.conf"), []byte(trust), 0o600); err != nil {
		return "", nil, err
	}
	return setpriv, append(as, program, "-D", data, "-p", port, "-c", "listen_addresses=0.0.0.0", "-c", "unix_socket_directories="), nil
}

// Ask starts a client of the service in one container, in another one, with conns
// connections, each of which waits for an answer before it asks again. It begins paused.
func (r *Rig) Ask(ctx context.Context, s Service, server, client, conns int) (*Generator, error) {
	return r.Start(ctx, r.Boxes[client], "rr-client", "--proto", s.proto(), "--size", strconv.Itoa(pageSize),
		"--conns", strconv.Itoa(conns), "--to", r.target(server), "--rate", "0")
}

// Retransmitted is how many segments of TCP were sent again so far in the network
// namespace of a process.
func Retransmitted(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/snmp", pid))
	if err != nil {
		return 0, err
	}
	var names []string
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "Tcp:" {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		for i, name := range names {
			if name == "RetransSegs" && i < len(fields) {
				return strconv.ParseUint(fields[i], 10, 64)
			}
		}
	}
	return 0, fmt.Errorf("no segments of TCP in /proc/%d/net/snmp", pid)
}
