package load

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
)

// dialogue is how rr-client speaks with a real server: begin prepares the server, and the client
// then repeats one request on the connection.
type dialogue struct {
	// begin prepares the server and returns the request, which the server always
	// answers in the same length.
	begin func(c net.Conn, size int) (request []byte, err error)
	// read reads one whole answer.
	read func(r *bufio.Reader) error
}

// protocols returns the values of --proto. rr-server echoes the protocols without a dialogue.
func protocols() map[string]dialogue {
	return map[string]dialogue{
		"udp": {}, "tcp": {},
		"memcached": {beginMemcached, readMemcached},
		"redis":     {beginRedis, readRedis},
		"http":      {beginHTTP, readHTTP},
		"postgres":  {beginPostgres, readPostgres},
	}
}

// converse begins a dialogue on a connection. It asks once, and returns the request and the length
// of each answer.
func (d dialogue) converse(c net.Conn, size int) (request []byte, answer int, err error) {
	if request, err = d.begin(c, size); err != nil {
		return nil, 0, err
	}
	if _, err := c.Write(request); err != nil {
		return nil, 0, err
	}
	var seen counter
	r := bufio.NewReader(io.TeeReader(c, &seen))
	if err := d.read(r); err != nil {
		return nil, 0, err
	}
	return request, int(seen) - r.Buffered(), nil
}

// counter counts the bytes written to it.
type counter int

func (n *counter) Write(p []byte) (int, error) {
	*n += counter(len(p))
	return len(p), nil
}

const key = "fairlead"

func value(size int) []byte { return bytes.Repeat([]byte{'x'}, size) }

// expect reads the answer that the server has to give.
func expect(r io.Reader, want string) error {
	answer := make([]byte, len(want))
	if _, err := io.ReadFull(r, answer); err != nil {
		return err
	}
	if string(answer) != want {
		return fmt.Errorf("the server answers %q", answer)
	}
	return nil
}

// memcached's text protocol (protocol.txt of memcached, "Storage commands", "Retrieval
// command").
func beginMemcached(c net.Conn, size int) ([]byte, error) {
	if _, err := fmt.Fprintf(c, "set %s 0 0 %d\r\n%s\r\n", key, size, value(size)); err != nil {
		return nil, err
	}
	return []byte("get " + key + "\r\n"), expect(c, "STORED\r\n")
}

func readMemcached(r *bufio.Reader) error {
	for {
		line, err := r.ReadString('\n')
		if err != nil || line == "END\r\n" {
			return err
		}
	}
}

// Redis's protocol, RESP.
func beginRedis(c net.Conn, size int) ([]byte, error) {
	if _, err := fmt.Fprintf(c, "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(key), key, size, value(size)); err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", len(key), key), expect(c, "+OK\r\n")
}

func readRedis(r *bufio.Reader) error {
	line, err := r.ReadString('\n')
	if err != nil {
		return err
	}
	size, err := strconv.Atoi(line[1:max(1, len(line)-2)])
	if err != nil || line[0] != '$' || size < 0 {
		return fmt.Errorf("redis answers %q", line)
	}
	_, err = r.Discard(size + len("\r\n"))
	return err
}

// HTTP/1.1. The server has a page for each requested size, named after it.
func beginHTTP(_ net.Conn, size int) ([]byte, error) {
	return fmt.Appendf(nil, "GET /%d HTTP/1.1\r\nHost: fairlead\r\n\r\n", size), nil
}

func readHTTP(r *bufio.Reader) error {
	answer, err := http.ReadResponse(r, nil)
	if err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK || answer.ContentLength < 0 {
		return fmt.Errorf("the web server answers %q", answer.Status)
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return err
}

// PostgreSQL's protocol 3.0 ("Frontend/Backend Protocol"), for a server with trust authentication.
// The query needs no table.
func beginPostgres(c net.Conn, size int) ([]byte, error) {
	parameters := "user\x00postgres\x00database\x00postgres\x00\x00"
	start := binary.BigEndian.AppendUint32(nil, uint32(8+len(parameters)))
	start = binary.BigEndian.AppendUint32(start, 3<<16)
	if _, err := c.Write(append(start, parameters...)); err != nil {
		return nil, err
	}
	query := fmt.Sprintf("SELECT repeat('x', %d)\x00", size)
	request := binary.BigEndian.AppendUint32([]byte{'Q'}, uint32(4+len(query)))
	return append(request, query...), readPostgres(bufio.NewReader(c))
}

// readPostgres reads messages until the server is ready for a query.
func readPostgres(r *bufio.Reader) error {
	for {
		var head [5]byte // its type, and its length without that
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return err
		}
		if head[0] == 'E' {
			return fmt.Errorf("postgres refuses")
		}
		if _, err := r.Discard(int(binary.BigEndian.Uint32(head[1:])) - 4); err != nil {
			return err
		}
		if head[0] == 'Z' {
			return nil
		}
	}
}

// names returns the protocols in order.
func names() []string { return slices.Sorted(maps.Keys(protocols())) }
