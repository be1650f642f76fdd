# fairlead: one static binary. `make help` lists the targets.

PREFIX  ?= /usr/local
DESTDIR ?=
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
FUZZTIME ?= 5s
STATICCHECK_VERSION = v0.8.2
STATICCHECK = build/staticcheck-$(STATICCHECK_VERSION)/staticcheck

export CGO_ENABLED = 0
LDFLAGS = -s -w -X main.version=$(VERSION)

# Packages whose tests import testkit change the host, so they run one after
# another; the others run side by side. New packages fall into place.
HAS_TESTS = {{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{.TestImports}} {{.XTestImports}}{{end}}
HOST_TESTS = $(shell go list -e -f '$(HAS_TESTS)' ./... | awk '/internal\/testkit/ && $$1 !~ /test\/vm$$/ {print $$1}')
PURE_TESTS = $(shell go list -e -f '$(HAS_TESTS)' ./... | awk '!/internal\/testkit/ {print $$1}')

.PHONY: help build install demo test race fuzz vm lint generate check-generated clean
.DEFAULT_GOAL := help

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build the binary ./fairlead
	go build -ldflags '$(LDFLAGS)' -o fairlead ./cmd/fairlead

install: build ## install the binary, the systemd unit and the documentation
	install -D -m 0755 fairlead $(DESTDIR)$(PREFIX)/bin/fairlead
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system $(DESTDIR)$(PREFIX)/share/doc/fairlead
	sed 's|/usr/bin/|$(PREFIX)/bin/|; s|/usr/share/|$(PREFIX)/share/|' packaging/fairlead.service \
		>$(DESTDIR)$(PREFIX)/lib/systemd/system/fairlead.service
	cp -R README.md LICENSE docs packaging/*.yaml $(DESTDIR)$(PREFIX)/share/doc/fairlead/

demo: ## one minute of before and after, on this machine, as root
	@test/setup demo
	@$(MAKE) --no-print-directory build
	./fairlead demo

test: ## all tests, as root: unit, on this kernel, with real runtimes, on other kernels
	@test "$$(id -u)" = 0 || { echo "make test needs root; without, go test ./... runs what can be run" >&2; exit 1; }
	@test/setup test
	@go build ./... && go build -o build/tally ./test/tally
	@FAIRLEAD_VM=1 build/tally -again 5 -skips test/expected-skips.txt -- \
		-count=1 $(PURE_TESTS) -- \
		-count=1 -p 1 -timeout 20m $(HOST_TESTS) -- \
		-count=1 -timeout 75m ./test/vm

race: ## the tests that leave the host alone, with the race detector
	CGO_ENABLED=1 go test -race -count=1 $(PURE_TESTS)

fuzz: ## every Fuzz function for FUZZTIME
	@test/fuzz $(FUZZTIME)

vm: ## the tests on other kernels only; VM_KERNELS="6.1 6.12" chooses
	@test/setup vm
	FAIRLEAD_VM=1 go test -count=1 -v -timeout 75m ./test/vm

lint: $(STATICCHECK) ## gofmt, vet, staticcheck and the house rules
	@test/setup lint
	@failed=; \
	out=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); \
	test -z "$$out" || { echo "not formatted by gofmt: $$out"; failed=yes; }; \
	go vet ./... || failed=yes; \
	$(STATICCHECK) ./... || failed=yes; \
	go test -count=1 ./test/rules || failed=yes; \
	test -z "$$failed"

# Not a tool of go.mod: its dependencies are none of ours.
$(STATICCHECK):
	GOBIN=$(CURDIR)/$(@D) go install honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION)

generate: ## rebuild the BPF objects and their Go types (clang 14, libbpf headers)
	@test/generate

check-generated: ## fail if the committed BPF objects differ from what generate makes
	@test/generate --check

clean: ## remove what the other targets built
	rm -rf build fairlead
