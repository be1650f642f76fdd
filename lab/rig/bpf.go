package rig

//go:generate go tool bpf2go -target bpfel -cc $BPF2GO_CC -strip $BPF2GO_STRIP -no-global-types queue queue.bpf.c -- -O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -target bpfel -cc $BPF2GO_CC -strip $BPF2GO_STRIP -no-global-types stopwatch stopwatch.bpf.c -- -O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -target bpfel -cc $BPF2GO_CC -strip $BPF2GO_STRIP -no-global-types -type stamp tap tap.bpf.c -- -O2 -g -Wall -Werror -I../../bpf -idirafter /usr/include/x86_64-linux-gnu
