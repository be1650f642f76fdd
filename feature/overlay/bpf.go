package overlay

//go:generate go tool bpf2go -target bpfel -cc $BPF2GO_CC -strip $BPF2GO_STRIP -no-global-types -type network -type tunnel -type end_key -type end -type host_key -type remote -type local -type flow_key -type flow -type counts -type passed -type note -type sight -type uplink overlay overlay.bpf.c -- -O2 -g -mcpu=v3 -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu
