# every target sets up what it needs in .venv, so each works alone on a fresh clone: run what serving
# needs, the others what tests need too
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.ready
NODE := $(VENV)/.node

# hundreds of processes start in the tests: each would compile the package again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run wheel check house test slice test-all bench bench-peers clients foreign-suites docs docs-site
.PHONY: clean

setup: $(STAMP)

# installs what requirements/ lists, by digest, and nothing else; without an NVIDIA driver torch's CPU
# build from an index of pip's, or from TORCH_INDEX=URL, PyTorch's. Only where no index has that build,
# the one with CUDA: pip names the versions that it found
# what is imported is compiled then, a twentieth of it; pip would compile all
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q --no-deps --no-compile
LOCKED := $(PIP) --require-hashes -r requirements
$(SERVING): pyproject.toml setup.py $(wildcard requirements/*)
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing what serving needs (a minute or two the first time)"
	@if command -v nvidia-smi >/dev/null; then $(LOCKED)/torch-pypi.txt; \
	elif $(LOCKED)/torch-cpu.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) 2>$(VENV)/torch.log; \
	then :; \
	elif test -z "$(TORCH_INDEX)" && grep -q "from versions: [0-9]" $(VENV)/torch.log; then \
	echo "no index has torch's CPU build (TORCH_INDEX=URL adds PyTorch's): installing the one with CUDA"; \
	$(LOCKED)/torch-pypi.txt; \
	else cat $(VENV)/torch.log >&2; exit 1; fi
	@$(LOCKED)/runtime.txt
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(STAMP): $(SERVING)
	@echo "installing what tests and checks need (a few minutes the first time)"
	@$(LOCKED)/dev.txt
	@touch $@

# the shipped experts are for the default model; beside another one they wait
run: $(SERVING)
	$(BIN)/coterie expert install --now --shipped
	$(BIN)/coterie serve $(MODEL)

# dist/coterie-*.whl for this machine's family of CPUs, its kernels compiled: docs/kernels.md
wheel: $(SERVING)
	COTERIE_WHEEL_KERNELS=1 $(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist .

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --cache-dir .cache/import_linter
	$(BIN)/python scripts/check_house.py
	$(BIN)/python scripts/generate_docs.py --check
	$(BIN)/python scripts/generate_sdk.py --check
	$(BIN)/python scripts/generate_proto.py --check

# sizes, branches, importers: guides to read, they fail nothing
house: setup
	@$(BIN)/python scripts/house.py

# the TypeScript client is tested with Node: the system's, or one from the package index
$(NODE): $(STAMP)
	@command -v node >/dev/null && command -v npm >/dev/null || { echo "installing Node"; \
	$(LOCKED)/node.txt; }
	@touch $@

# the checks and the tests side by side: of two cores mypy keeps one busy
test: $(NODE)
	@$(MAKE) --no-print-directory -j 2 check slice

# tests wait for servers and for each other's locks: four at a time keep two cores busy; long files
# first (tests/conftest.py)
slice: $(NODE)
	$(BIN)/pytest -m "not full" -n 4 --dist loadfile --no-loadscope-reorder --durations=15

# counts the lines that run, in servers and workers too, which takes half as long again; `COVERAGE=`
# leaves that out
COVERAGE ?= -p pytest_cov --cov --cov-report=term --cov-report=html:.cache/coverage/html
test-all: check $(NODE)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=30 $(COVERAGE)

# clients of others against a real server; downloads them: docs/clients.md
clients: $(NODE)
	$(BIN)/python -m tests.clients $(CLIENTS)

# API tests of vLLM, SGLang and llama.cpp; clones them: docs/api.md, Differences from other servers
foreign-suites: setup
	$(BIN)/python -m tests.foreign $(SUITES)

bench: setup
	$(BIN)/python -m benchmarks.run

bench-peers: setup
	$(BIN)/python -m benchmarks.peers --install
	$(BIN)/python -m benchmarks.dense.cpu

docs: setup
	$(BIN)/python scripts/generate_docs.py
	$(BIN)/python scripts/generate_sdk.py
	$(BIN)/python scripts/generate_proto.py

# the pages as a site in build/site, its links checked
docs-site:
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -q --disable-pip-version-check mkdocs-material==9.6.22
	.venv-docs/bin/python scripts/make_site.py

clean:
	rm -rf $(VENV) .venv-peers* .venv-docs .cache build dist *.egg-info sdk/typescript/node_modules sdk/typescript/dist
