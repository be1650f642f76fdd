package drop

//go:generate go tool bpf2go -target bpfel -cc $BPF2GO_CC -strip $BPF2GO_STRIP -no-global-types -type tenant -type fl_device -type fl_fate -type fl_address -type owner -type queue -type veth drop drop.bpf.c -- -O2 -g -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu
