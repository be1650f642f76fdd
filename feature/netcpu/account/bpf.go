package account

//go:generate go tool bpf2go -target bpfel -cc $BPF2GO_CC -strip $BPF2GO_STRIP -no-global-types -type account -type theft -type cpu account account.bpf.c -- -O2 -g -mcpu=v3 -Wall -Werror -I../../../bpf -idirafter /usr/include/x86_64-linux-gnu
