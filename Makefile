# fairlead: one static binary, and fairlead-lab, which measures what it does. `make help` lists the targets.

PREFIX  ?= /usr/local
DESTDIR ?=
RELEASE = $(shell sed -n 's/^const Release = "\(.*\)"/\1/p' api/version.go)
# The suffix is the commit, unless it has the release's tag or there is no git.
VERSION ?= $(RELEASE)$(shell git describe --tags --always --dirty 2>/dev/null | sed '/^v$(RELEASE)$$/d; s/-/./g; s/^/-dev+/')
FUZZTIME ?= 5s
STATICCHECK_VERSION = v0.8.2
STATICCHECK = build/staticcheck-$(STATICCHECK_VERSION)/staticcheck
NILAWAY_VERSION = v0.0.0-20260918162853-acb8859b9031
NILAWAY = build/nilaway-$(NILAWAY_VERSION)/nilaway
NFPM_VERSION = v2.45.2
NFPM = build/nfpm-$(NFPM_VERSION)/nfpm
CYCLONEDX_VERSION = v1.10.0
CYCLONEDX = build/cyclonedx-$(CYCLONEDX_VERSION)/cyclonedx-gomod

export CGO_ENABLED = 0
# grpc's traces in golang.org/x/net link templates, which keep the linker from dropping unused code.
# Tests and linters have the same tag, so that each package is compiled once.
TAGS = grpcnotrace
export GOFLAGS := $(shell go env GOFLAGS 2>/dev/null) -tags=$(TAGS)
LDFLAGS = -s -w -X main.version=$(VERSION)
# Flags of releases. Go would stamp whether the clone has uncommitted files, but
# VERSION names the commit.
RELEASED = -trimpath -buildvcs=false -ldflags '$(LDFLAGS)'

# Packages whose tests check what they leave behind (testkit.Main) change the host,
# so they run one after another, and the next one is built meanwhile. Other packages
# that import testkit run beside them. New packages are found automatically. Only targets
# that use the list make it, once.
HAS_TESTS = {{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{.Dir}}{{end}}
TESTED = $(eval TESTED := $(shell go list -e -f '$(HAS_TESTS)' ./... | grep -v '/test/vm ' | while read -r package dir; do \
	if grep -qsE '^[^"]*\<(Main|Run)\((c\.)?m\)' $$dir/*_test.go; then echo host:$$package; \
	elif grep -qs internal/testkit $$dir/*_test.go; then echo kit:$$package; else echo pure:$$package; fi; done))$(TESTED)
PURE_TESTS = $(patsubst pure:%,%,$(filter pure:%,$(TESTED)))
KIT_TESTS = $(patsubst kit:%,%,$(filter-out $(RACED),$(filter kit:%,$(TESTED))))
HOST_TESTS = $(patsubst host:%,%,$(filter-out $(RACED),$(filter host:%,$(TESTED))))
# Packages that start goroutines are worth the race detector, even though their
# tests change the host.
RACED = $(filter %/agent %/agent/serve %/api %/discover %/cmd/fairlead/node %/cmd/fairlead/views,$(filter host:% kit:%,$(TESTED)))
RACE_TESTS = $(patsubst kit:%,%,$(patsubst host:%,%,$(RACED)))
# A package's time includes the wait for its turn.
TURNS = -timeout $(if $(filter full,$(TIER)),60m,20m) -exec 'flock -o /run/fairlead-turns.lock'
# With RACE=-race (as in .ci/run) these run under the race detector, once.
RACE ?=

.PHONY: help version build install install-files install-docs manual package image release release-tools demo test test-full fleet race fuzz vm bars lint generate check-generated clean
.DEFAULT_GOAL := help

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

version: ## print the version of a build, as packages need it
	@echo $(VERSION)

build: ## build the binaries ./fairlead and ./fairlead-lab
	go build -ldflags '$(LDFLAGS)' -o . ./cmd/fairlead ./cmd/fairlead-lab

install: build install-files ## install fairlead, its systemd units, man pages and the documentation, and not fairlead-lab, which hosts do not need

PROGRAM ?= fairlead
install-files: manual install-docs
	install -D -m 0755 $(PROGRAM) $(DESTDIR)$(PREFIX)/bin/fairlead
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	for unit in fairlead fairlead-restore; do \
		sed 's|/usr/bin/|$(PREFIX)/bin/|; s|/usr/share/|$(PREFIX)/share/|' packaging/$$unit.service \
			>$(DESTDIR)$(PREFIX)/lib/systemd/system/$$unit.service || exit 1; \
	done
	cp -R build/manual/. $(DESTDIR)$(PREFIX)/share/

# With their folders, so that links between them work.
install-docs:
	for doc in LICENSE packaging/*.md packaging/*.service packaging/fairlead.yaml $$(find examples packaging/kubernetes -type f) $$(find *.md docs feature -name '*.md' -not -name '*_TEMPLATE.md') docs/pictures/*; do \
		install -D -m 0644 $$doc $(DESTDIR)$(PREFIX)/share/doc/fairlead/$$doc || exit 1; \
	done

# The time of the sources, for all dates in builds: equal sources make equal bytes.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
export SOURCE_DATE_EPOCH := $(SOURCE_DATE_EPOCH)

# Made by a build for this machine, as they are the same for every architecture.
# With the flags of the program, its packages are compiled only once.
manual:
	rm -rf build/manual
	GOARCH= TZ=UTC go run $(TRIM) -tags '$(TAGS) manual' -ldflags '-X main.version=$(VERSION)' ./cmd/fairlead build/manual

ARCH ?= $(shell go env GOARCH)
TREE = build/package/$(ARCH)
OUT ?= build/release
# apk has one name for all versions before a release, because it accepts no commit.
package: $(NFPM) ## deb, rpm and apk for ARCH, into OUT
	rm -rf $(TREE)
	mkdir -p $(TREE)/program $(OUT)
	GOARCH=$(ARCH) go build $(RELEASED) -o $(TREE)/program/ ./cmd/fairlead
	umask 022; $(MAKE) --no-print-directory install-files PROGRAM=$(TREE)/program/fairlead DESTDIR=$(TREE)/files PREFIX=/usr TRIM=-trimpath
	gzip -9n $(TREE)/files/usr/share/man/man1/*
	install -D -m 0755 -t $(TREE)/scripts packaging/scripts/*
	sed 's|@TREE@|$(TREE)|' packaging/nfpm.yaml >$(TREE)/nfpm.yaml
	find $(TREE) -exec touch -d @$(SOURCE_DATE_EPOCH) {} +
	for kind in deb rpm apk; do \
		version=$(VERSION); [ $$kind != apk ] || version=$${version%%-dev+*}$(if $(findstring -dev,$(VERSION)),-pre); \
		ARCH=$(ARCH) VERSION=$$version $(NFPM) package -f $(TREE)/nfpm.yaml -p $$kind -t $(OUT)/ || exit 1; \
	done

# A tag has no "+", which Helm replaces in the versions of labels, too.
IMAGE ?= ghcr.io/fairlead-project/fairlead:$(subst +,_,$(VERSION))
IMAGE_PARTS = $(subst :, ,$(IMAGE))
# The manifests to apply with that image: base or observe-only.
BASE ?= base
IMAGE_TOOL = build/image
image: $(IMAGE_TOOL) ## the container image as an OCI archive for amd64 and arm64, into OUT, and what applies it to a cluster
	mkdir -p $(OUT)
	for arch in amd64 arm64; do \
		GOARCH=$$arch go build $(RELEASED) -o build/package/$$arch/program/ ./cmd/fairlead || exit 1; \
	done
	$(IMAGE_TOOL) $(IMAGE) LICENSE build/package/amd64/program/fairlead build/package/arm64/program/fairlead >$(OUT)/fairlead-$(VERSION)-image.tar
	@mkdir -p build/kubernetes
	@printf '%s\n' 'resources: [../../packaging/kubernetes/$(BASE)]' 'images: [{name: $(word 1,$(IMAGE_PARTS)), newTag: "$(word 2,$(IMAGE_PARTS))"}]' >build/kubernetes/kustomization.yaml
	@printf '%s\n' 'On each node:  ctr -n k8s.io images import $(OUT)/fairlead-$(VERSION)-image.tar' 'Then:          kubectl apply -k build/kubernetes'

# Its modules are not ours.
.PHONY: $(IMAGE_TOOL)
$(IMAGE_TOOL):
	GOARCH= go -C packaging/image build -o $(CURDIR)/$@ .

# The ssh key that signs the checksums (ssh-keygen -Y sign); empty: no signature.
RELEASE_KEY ?=
release: $(CYCLONEDX) ## packages and the image for all architectures, the chart, what is in them (SBOM), checksums and, with RELEASE_KEY, their signature, into build/release
	rm -rf $(OUT)
	for arch in amd64 arm64; do \
		$(MAKE) --no-print-directory package ARCH=$$arch || exit 1; \
		$(CYCLONEDX) bin -json -noserial -notimestamp -std -version $(VERSION) \
			-output $(OUT)/fairlead-$(VERSION)-$$arch.cdx.json build/package/$$arch/program/fairlead || exit 1; \
	done
	$(MAKE) --no-print-directory image
	tar --sort=name --mtime=@$(SOURCE_DATE_EPOCH) --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --transform='s|^chart|fairlead|' \
		-C packaging/kubernetes -c chart | gzip -9n >$(OUT)/fairlead-$(RELEASE).tgz
	cd $(OUT) && sha256sum * >SHA256SUMS
	$(if $(RELEASE_KEY),ssh-keygen -Y sign -q -n fairlead-release -f $(abspath $(RELEASE_KEY)) $(OUT)/SHA256SUMS)

demo: ## half a minute of before and after, on this machine, as root
	@test/setup demo
	go build -ldflags '$(LDFLAGS)' -o . ./cmd/fairlead-lab
	./fairlead-lab demo

# Two runs side by side would take each other's cgroups for their own.
ONE_RUN = /run/fairlead-test.lock

# The tiers: test/tally says at the end of each what it leaves out. Guests, which
# are emulated, and the packages that change no host run beside those that do, which
# wait for most of their time; nothing runs beside a figure.
TIER ?= quick
LIMIT_quick = 40m
LIMIT_ci = 55m
LIMIT_full = 150m
SCOPE_quick = Not in this tier: lint, generated code, race detector, fuzzing, churn, a fault at each call, what takes a feature long, all forms of a network but one, and what depends on the kernel in full on the oldest and the newest (bash .ci/run); full counts, every kernel in full, and the figures (make test-full).
SCOPE_ci = Not in this tier: full counts, every kernel in full, and all figures but a few (make test-full).
SCOPE_full = Not in this tier: lint, generated code, race detector and fuzzing (bash .ci/run).

test: ## the tests of every day, as root: this kernel, real runtimes, a smoke on other kernels
	@test "$$(id -u)" = 0 || { echo "make test needs root; without, go test ./... runs what can be run" >&2; exit 1; }
	@test/setup test
	$(if $(filter full,$(TIER)),@test/setup browser || echo "no browser: the pages are not looked at" >&2)
	$(if $(filter full,$(TIER)),@test/setup kubernetes || echo "what a cluster needs is missing: no fleet is tried" >&2)
	$(if $(filter full,$(TIER)),@test/setup packages || echo "what some packages need is missing: they are not tried" >&2)
	@go build ./... && go build -o build/tally ./test/tally
	@flock -n $(ONE_RUN) true || echo "waiting for another run of the tests on this machine to end" >&2
	@FAIRLEAD_VM=1 FAIRLEAD_TIER=$(TIER) flock -o $(ONE_RUN) build/tally -lists test -limit $(LIMIT_$(TIER)) -scope '$(SCOPE_$(TIER))' -- \
		+ -count=1 -vet=off -timeout $(LIMIT_$(TIER)) ./test/vm $(KIT_TESTS) -- \
		+ CGO_ENABLED=$(if $(RACE),1,0) $(RACE) -p 1 -count=1 -vet=off $(PURE_TESTS) -- \
		+ CGO_ENABLED=$(if $(RACE),1,0) $(RACE) -p 1 -count=1 -vet=off $(TURNS) $(RACE_TESTS) -- \
		-p 2 -count=1 -vet=off $(TURNS) $(HOST_TESTS)

test-full: ## every test in full, on every kernel, and the figures: more than an hour, alone on the machine
	@status=0; $(MAKE) --no-print-directory bars || status=1; \
	$(MAKE) --no-print-directory test TIER=full || status=1; exit $$status

# BARS=few is for every change: CPU time that is a victim's own, three real servers, a
# rate and a ceil, requests by the short path of an overlay network.
# Without the protection these figures are off by a factor also on a machine that
# is busy, where a share of a link can come out right by chance.
BARS ?= all
FEW_netcpu = --quick --check=far --only '^(hop 50/50 flood|redis 50 isolate alone|memcached 20 isolate alone|nginx 50 isolate alone)$$'
FEW_traffic = --quick --check=far --only '^bridge (rate beside flood|ceil)$$'
FEW_overlay = --quick --check=far --only '^routed udp rr 32$$'
FEW_blockio = --quick --check=far --only '^12 burners, depth 1$$'

bars: build ## every figure against its bar, as root, alone on the machine; BARS=few: a few in a minute, for a miss by far
	@status=0; \
	./fairlead-lab bench netcpu $(if $(filter few,$(BARS)),$(FEW_netcpu),--check) || status=1; \
	./fairlead-lab bench traffic $(if $(filter few,$(BARS)),$(FEW_traffic),--check) || status=1; \
	$(if $(filter few,$(BARS)),,./fairlead-lab bench latency --check || status=1;) \
	./fairlead-lab bench overlay $(if $(filter few,$(BARS)),$(FEW_overlay),--check) || status=1; \
	./fairlead-lab bench blockio $(if $(filter few,$(BARS)),$(FEW_blockio),--check) || status=1; exit $$status

fleet: ## what a fleet must show, on two nodes of Kubernetes on this machine, as root; the first time Kubernetes is built, for minutes
	@test/setup kubernetes
	FAIRLEAD_TIER=full go test -count=1 -v -timeout 40m ./test/fleet

race: ## the race detector on all that has goroutines of its own, as root
	@test/setup test
	CGO_ENABLED=1 go test -race -count=1 $(PURE_TESTS)
	CGO_ENABLED=1 go test -race -count=1 -p 1 $(RACE_TESTS)

fuzz: ## every Fuzz function for FUZZTIME
	@test/fuzz $(FUZZTIME)

vm: ## other kernels only; TIER=ci for more, VM_KERNELS="6.1 6.12" and VM_PACKAGES choose
	@test/setup vm
	FAIRLEAD_VM=1 FAIRLEAD_TIER=$(TIER) go test -count=1 -v -timeout 75m ./test/vm

# The linters keep most of what they make: collected more rarely, it costs them a fifth less CPU, for half
# a gigabyte.
lint: export GOGC = 400
lint: $(STATICCHECK) $(NILAWAY) ## gofmt, vet, staticcheck, nilaway and the house rules
	@test/setup lint
	@failed=; \
	out=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); \
	test -z "$$out" || { echo "not formatted by gofmt: $$out"; failed=yes; }; \
	go vet ./... || failed=yes; \
	$(STATICCHECK) ./... || failed=yes; \
	test/nilaway $(NILAWAY) || failed=yes; \
	go test -count=1 ./test/rules || failed=yes; \
	test -z "$$failed"

# No tools of go.mod: their dependencies are none of ours.
$(STATICCHECK):
	GOBIN=$(CURDIR)/$(@D) go install honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION)

$(NILAWAY):
	GOBIN=$(CURDIR)/$(@D) go install go.uber.org/nilaway/cmd/nilaway@$(NILAWAY_VERSION)

release-tools: $(NFPM) $(CYCLONEDX)

$(NFPM):
	GOBIN=$(CURDIR)/$(@D) go install github.com/goreleaser/nfpm/v2/cmd/nfpm@$(NFPM_VERSION)

$(CYCLONEDX):
	GOBIN=$(CURDIR)/$(@D) go install github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@$(CYCLONEDX_VERSION)

generate: ## rebuild the BPF objects and their Go types (clang 14, libbpf headers)
	@test/generate

check-generated: ## fail if the committed BPF objects differ from what generate makes
	@test/generate --check

clean: ## remove what the other targets built
	rm -rf build fairlead fairlead-lab
