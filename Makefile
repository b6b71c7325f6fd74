# The front door. Every target does its own set-up: a clean clone, make and Python >= 3.11 are enough.
# Works with GNU make 3.81 (macOS) and later.

VENV   ?= .venv
MODEL  ?=
PORT   ?= 8080
ARGS   ?=
# What Linux computes with: cpu, cuda12 or cuda13. macOS uses Metal whatever this says.
EXTRA  ?= cpu
# Test processes at once.
WORKERS ?= 2

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
SERVE  := $(VENV)/.installed-$(EXTRA)
DEV    := $(VENV)/.installed-dev
KERNELS := $(VENV)/.built-kernels
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help serve install dev kernels try-kernels test check lint types contracts size sanitize neon parity e2e agents bench structured docs docs-check lock clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1|/' | \
	  while IFS='|' read -r target text; do printf '%-18s %s\n' "$$target" "$$text"; done
	@echo
	@echo '  make serve MODEL=... PORT=... ARGS="--kv-quant 8"   ARGS go to `mantou serve` as they are'
	@echo '  make serve EXTRA=cuda13                            on Linux with an NVIDIA GPU (or cuda12)'

# ------------------------------------------------------------------ set-up (stamp files in the venv)
$(VENV)/.created:
	@PYTHON='$(PYTHON)' sh scripts/venv.sh '$(VENV)'
	@touch $@

# The package itself is installed in place; its metadata only changes with pyproject.toml.
$(SERVE): $(VENV)/.created requirements/serve-$(EXTRA).lock pyproject.toml
	@echo 'Installing the locked dependencies for $(EXTRA) into $(VENV) (once) ...'
	@$(PIP) install -qq --require-hashes -r requirements/serve-$(EXTRA).lock
	@$(PIP) install -qq --no-deps --no-build-isolation --no-index -e .
	@touch $@

$(DEV): $(VENV)/.created requirements/dev.lock pyproject.toml
	@echo 'Installing the locked development dependencies into $(VENV) (once) ...'
	@$(PIP) install -qq --require-hashes -r requirements/dev.lock
	@$(PIP) install -qq --no-deps --no-build-isolation --no-index -e .
	@touch $@

install: $(SERVE) ## Create .venv and install what serving needs

dev: $(DEV) ## Create .venv and install what development needs

kernels: $(SERVE) ## Build the C++ kernels for CPUs again, even if they were built or failed before
	@rm -f $(KERNELS)
	@sh scripts/kernels.sh '$(VENV)' '$(KERNELS)'

# ------------------------------------------------------------------ use
# Kernels are optional: scripts/kernels.sh says in one sentence why they are missing and never fails.
try-kernels: $(VENV)/.created
	@sh scripts/kernels.sh '$(VENV)' '$(KERNELS)'

serve: $(SERVE) ## Serve the starter model (or MODEL=...) on 127.0.0.1:8080 (or PORT=...)
	@sh scripts/kernels.sh '$(VENV)' '$(KERNELS)'
	@exec $(BIN)/mantou serve $(MODEL) --port $(PORT) $(ARGS)

# ------------------------------------------------------------------ checks
test: check sanitize parity e2e ## Everything that CI runs

check: lint types contracts size docs-check try-kernels ## Style, types, contracts, sizes, generated docs, unit + compose + api tests
	@# On their own: a failed operation leaks a task count in MLX, which can stop later ones, and these provoke failures.
	$(PYTEST) -n $(WORKERS) $(wildcard tests/kernels)
	$(PYTEST) -n $(WORKERS) tests/unit tests/compose tests/api

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/basedpyright --pythonpath $(BIN)/python

contracts: $(DEV)
	$(BIN)/lint-imports

size: $(DEV)
	$(BIN)/python scripts/size.py

sanitize: $(DEV) try-kernels ## The C++ kernels' tests with the address and undefined-behaviour sanitizers
	@sh scripts/sanitize.sh '$(VENV)' $(WORKERS)

neon: ## The kernels' inner loops for AArch64 under qemu (g++-aarch64-linux-gnu, qemu-user-static)
	@scripts/native_kernels.sh neon build/native

parity: $(DEV) try-kernels ## SmolLM2 against mlx_lm itself: greedy tokens and logits
	$(PYTEST) tests/parity

e2e: $(DEV) try-kernels ## The real server as a process: many clients, dropped clients, failures, leaks
	$(PYTEST) tests/e2e

agents: $(DEV) try-kernels ## Codex, Claude Code, opencode and pi from npm, live against a scripted model; ARGS="pi-chat"
	@sh scripts/agents.sh build/agents
	$(BIN)/python -m tests.agents.live $(ARGS)

structured: $(DEV) try-kernels ## 200 JSON schemas on the starter model, and what a grammar costs
	$(BIN)/python -m tests.bench.structured $(ARGS)

bench: $(DEV) try-kernels ## mantou and mlx_lm.server side by side; ARGS="--quick" for a short run
	$(BIN)/python -m tests.bench $(if $(MODEL),--model $(MODEL)) $(ARGS)
	$(BIN)/python -m tests.bench.speculation $(if $(MODEL),--model $(MODEL))

# ------------------------------------------------------------------ generated files
docs: $(DEV) ## Write the generated parts of README.md and docs/
	$(BIN)/python scripts/docs.py

docs-check: $(DEV)
	$(BIN)/python scripts/docs.py --check

lock: ## Resolve requirements/*.lock again (exact versions and hashes for every platform)
	@PYTHON='$(PYTHON)' sh scripts/lock.sh

clean: ## Remove the venv and every build output
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
