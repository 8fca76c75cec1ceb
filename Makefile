PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MANIFESTS := $(filter-out %/kustomization.yaml,$(wildcard deploy/kubernetes/*.yaml deploy/kubernetes/*/*.yaml))
PROTOS := $(wildcard protos/osmosis/*/v1/*.proto)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Exactly what the lock lists. Without bytecode: few modules are ever imported, and the import below compiles those.
LOCKED := --no-deps --require-hashes -r
# Installs a lock file: $(call install,PYTHON,LOCK). uv takes a tenth of pip's time, but does not read pip's configuration: where only
# that knows the package index, pip installs the same.
install = $(BIN)/uv pip install --quiet --python $(1) $(LOCKED) $(2) || $(PIP) --python $(1) install --no-compile $(LOCKED) $(2)
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate

# Tests start hundreds of programs. Without cached bytecode, each would compile the project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup environments browser demo up down test-quick test test-all bench bench-quick bench-publish bench-crowd bench-tokens bench-journal bench-tracing bench-lists bench-workers test-clients mutants mutants-tokens hostile hostile-templates simulate check format lint types oldest transformers4 adapters adapters-trl adapters-verl learn learn-picture node-example page-pictures deploy-checks docs protos sync-client release-protos lock clean

help: ## List the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(BIN)/uv: requirements/uv.lock | $(BIN)/python
	$(PIP) install --no-compile $(LOCKED) $<
	@touch $@

$(VENV)/.ready: requirements/dev.lock pyproject.toml | $(BIN)/uv
	$(call install,$(BIN)/python,$<)
	$(PIP) install --no-deps --no-build-isolation -e .
	@TRANSFORMERS_VERBOSITY=error $(BIN)/python -c "import rollout_server.cli.commands, rollout_gateway.app; from transformers import AutoTokenizer, GenerationConfig"
	@touch $@

.venv-%/.ready: requirements/%.lock | $(BIN)/uv
	$(PYTHON) -m venv --without-pip .venv-$*
	$(call install,.venv-$*/bin/python,$<)
	@touch $@

# Frameworks of trainers. torch comes last and without hashes: which build it is, for the CPU or with CUDA, depends on pip's index.
.venv-trl/.ready .venv-verl/.ready: .venv-%/.ready: requirements/%.lock requirements/torch.in | $(BIN)/uv
	$(PYTHON) -m venv --without-pip .venv-$*
	$(call install,.venv-$*/bin/python,$<)
	$(PIP) --python .venv-$*/bin/python install --no-compile -r requirements/torch.in
	@touch $@

setup: $(VENV)/.ready ## Create .venv from the lock file

protos: .venv-protos/.ready ## Generate the Python code in generated/ from protos/
	find generated -name '*_pb2*' -delete
	PATH="$(CURDIR)/.venv-protos/bin:$$PATH" .venv-protos/bin/python -m grpc_tools.protoc -I protos \
		--python_out=generated --grpc_python_out=generated --mypy_out=quiet:generated --mypy_grpc_out=quiet:generated $(PROTOS)

sync-client: setup ## Generate the synchronous client from the async client
	$(BIN)/python gateway/unasync.py

release-protos: setup ## Replace the baseline of `buf breaking` (only for a release, or before the first one)
	$(BIN)/buf build -o protos/released.binpb

lock: $(BIN)/uv ## Update the lock files
	echo uv | $(COMPILE) - -o requirements/uv.lock
	$(COMPILE) pyproject.toml --extra dev -o requirements/dev.lock
	$(COMPILE) requirements/protos.in -o requirements/protos.lock
	$(COMPILE) requirements/oldest.in -o requirements/oldest.lock
	$(COMPILE) requirements/transformers4.in -o requirements/transformers4.lock
	$(COMPILE) --no-deps requirements/templates.in -o requirements/templates.lock
	$(COMPILE) --overrides requirements/without-torch.txt requirements/trl.in -o requirements/trl.lock
	$(COMPILE) --overrides requirements/without-torch.txt requirements/verl.in -o requirements/verl.lock
	$(COMPILE) requirements/clients.in -o requirements/clients.lock
	$(COMPILE) pyproject.toml --extra server --extra otel -c requirements/dev.lock -o deploy/server.lock
	echo hatchling | $(COMPILE) - -c requirements/dev.lock -o deploy/build.lock

demo: setup ## Run rollouts over gRPC and HTTP with a strict trainer; show the author of every token
	$(BIN)/rollout demo

HTTP_PORT ?= 9000
GRPC_PORT ?= 50051
TRAINER_PORT ?= 9001
LOCAL := $(BIN)/python deploy/local.py
PORTS = --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --trainer-port $(TRAINER_PORT)

up: setup ## Start a server and a strict trainer in the background (HTTP_PORT=, GRPC_PORT=, TRAINER_PORT=)
	@$(LOCAL) up $(PORTS)

down: setup ## Stop the server and the trainer of `make up`
	@$(LOCAL) down

PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

test-quick: setup ## Run the tests of core, runtime and agents (under a minute)
	$(PYTEST) -m "not heavy" tests/core tests/runtime tests/agent

test: setup .venv-protos/.ready .venv-templates/.ready .venv-clients/.ready ## Run the tests that a change must pass (20 minutes on two cores)
	$(PYTEST) -m "not heavy"

test-all: setup .venv-protos/.ready .venv-templates/.ready .venv-clients/.ready ## Run all tests: before a release (45 minutes on two cores)
	$(PYTEST)

bench: setup ## Measure CPU, latency and memory for each API, beside bare loops (DIR=: tokenizer directory)
	$(BIN)/python -m bench $(if $(DIR),--tokenizer $(DIR))

bench-quick: setup ## The same with two small workloads, in half a minute; fails if a ratio has doubled
	$(BIN)/python -m bench --quick --check bench/ratios.json

bench-publish: setup ## Run `make bench`, and replace the tables and the chart of the README and of bench/README.md
	$(BIN)/python -m bench $(if $(DIR),--tokenizer $(DIR)) --json bench/results.json \
		--markdown README.md --markdown bench/README.md --chart docs/images/cost.svg
	$(BIN)/python -m bench --quick --record bench/ratios.json

bench-crowd: setup ## Measure thousands of rollouts at once, and extreme single ones; replace their table in bench/README.md
	$(BIN)/python -m bench.crowd $(if $(DIR),--tokenizer $(DIR)) --markdown bench/README.md

bench-tokens: setup ## Measure CPU per turn for tokens as the history grows (DIRS="...": tokenizer directories)
	$(BIN)/python -m bench.tokens $(DIRS)

bench-journal: setup ## Measure what the durable journal costs, compared with memory (DIR=: directory on the disk to measure)
	$(BIN)/python -m bench.journal $(if $(DIR),--directory $(DIR))

bench-lists: setup ## Measure lists of a server that knows 100,000 rollouts
	$(BIN)/python -m bench.lists

bench-tracing: setup ## Measure what OpenTelemetry adds to the CPU of a turn (ROUNDS=)
	$(BIN)/python -m bench.tracing$(if $(ROUNDS), --rounds $(ROUNDS))

bench-workers: setup ## Measure what two workers cost and gain, compared with one process
	$(BIN)/python -m bench.workers

hostile: setup ## Run all attacks of tests/hostile/attacks on a new server, then 100,000 fuzzed inputs (ARGS="...")
	$(BIN)/python -m tests.hostile $(ARGS)

hostile-templates: setup ## Test the renderer with random chat templates and conversations (SEED=, BOUNDARIES=)
	$(BIN)/python -m tests.hostile.templates --boundaries $(or $(BOUNDARIES),20000) --seed $(or $(SEED),1) --jobs 2

simulate: setup ## Run 50,000 simulated worlds with faults and crashes on all processors (SEEDS=0-1999)
	$(BIN)/python -m tests.simulator --seeds $(or $(SEEDS),0-49999)

format: setup ## Check the formatting of Python and protos
	$(BIN)/ruff format --check .
	$(BIN)/buf format --diff --exit-code

lint: setup ## Lint Python and protos
	$(BIN)/ruff check .
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/released.binpb

types: setup ## Check types
	$(BIN)/mypy server gateway tests/typing

oldest: .venv-oldest/.ready ## Run the contract tests with the oldest supported grpcio and protobuf
	PYTHONPATH=generated:server .venv-oldest/bin/python -m pytest tests/contract -p no:cacheprovider

docs: setup ## Generate the settings tables in docs/
	$(BIN)/python deploy/settings_tables.py

NODE_EXAMPLE := examples/tool_server_node/node_modules/.ready

$(NODE_EXAMPLE): examples/tool_server_node/package-lock.json
	cd examples/tool_server_node && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

node-example: $(NODE_EXAMPLE) ## Install the packages of the tool server in Node, which its tests run (npm; 14 MB)

build/clis/.ready: requirements/clis/package.json
	mkdir -p $(@D) && cp $< $(@D)
	cd $(@D) && npm install --no-audit --no-fund --loglevel=error
	@touch $@

# In a network namespace with loopback only: the agents reach the test's server and nothing else.
test-clients: setup build/clis/.ready ## Run Codex, Claude Code and OpenCode on a model endpoint (Linux with npm; 1 GB; RECORD=1: write their shapes)
	ROLLOUT_CLIS=build/clis unshare --map-root-user --net sh -c 'ip link set lo up && exec "$$@"' - \
		$(BIN)/python -m pytest -n 0 tests/clients/test_command_lines.py

# Each environment runs the tests of its framework; the others are not collected. The server of the tests runs in .venv.
# `make check` leaves heavy tests out: QUICK=1.
ADAPTERS := -m pytest --confcutdir tests/adapters --ignore tests/adapters/test_scenarios.py -p no:cacheprovider -W ignore::pytest.PytestConfigWarning

adapters: adapters-trl adapters-verl ## Run the adapters of rollout_client with TRL, OpenEnv and verl, each with the framework's own classes

adapters-trl adapters-verl: adapters-%: setup .venv-%/.ready
	PYTHONPATH=generated:gateway:server .venv-$*/bin/python $(ADAPTERS) $(if $(QUICK),-m "not heavy") tests/adapters

learn: setup .venv-trl/.ready ## A tiny model learns with TRL through the server, 5 minutes for one run (SEEDS="0 1", MASKS="right late early ones", STEPS=)
	PYTHONPATH=generated:gateway .venv-trl/bin/python examples/learn --seeds $(or $(SEEDS),0) --masks $(or $(MASKS),right) $(if $(STEPS),--steps $(STEPS))

learn-picture: setup ## Draw the published results of `make learn`, print their table (another file: RESULTS=, to build/learn/learning.svg or OUT=)
	$(BIN)/python examples/learn/picture.py $(or $(RESULTS),examples/learn/results.jsonl) $(or $(OUT),$(if $(RESULTS),build/learn,docs/images)/learning.svg)

transformers4: .venv-transformers4/.ready ## Run the token tests with the last transformers 4
	PYTHONPATH=generated:server ROLLOUT_EXAMPLES=few .venv-transformers4/bin/python -m pytest -n auto --dist worksteal -m "not heavy" tests/edge/tokens -p no:cacheprovider

deploy-checks: setup ## Lint the Dockerfile and validate the compose file and the Kubernetes manifests
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(BIN)/kubernetes-validate --strict --quiet $(MANIFESTS)

# The example in Node is left out where npm is missing: its tests skip and say so.
ENVIRONMENTS = $(addsuffix /.ready,$(VENV) .venv-protos .venv-oldest .venv-transformers4 .venv-templates .venv-clients .venv-trl .venv-verl) \
	$(if $(shell command -v npm),$(NODE_EXAMPLE))

environments: ## Create all environments that `make check` needs, in parallel
	@$(MAKE) --no-print-directory -j5 $(ENVIRONMENTS)

# As root on Debian: its package. Elsewhere Playwright downloads a browser of its own.
browser: setup ## Install Chromium for the tests of the live page, if there is none
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit; done; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq chromium >/dev/null; \
		else $(BIN)/playwright install chromium; fi

page-pictures: browser ## Take the pictures of the live page in docs/images
	$(BIN)/python -m tests.page.pictures docs/images

# Hundreds of tests wait for programs that they start. A machine that stalls for half a minute fails a few of them; a defect fails twice.
AGAIN := $(BIN)/python -m pytest --last-failed --last-failed-no-failures none --maxfail 3

# The browser comes over the network, so that it is installed beside the environments.
check: ## Run the tests and checks that a change must pass (25 minutes on two cores)
	@$(MAKE) --no-print-directory -j6 $(ENVIRONMENTS) browser
	@$(MAKE) --no-print-directory -j2 --output-sync=target QUICK=1 adapters types transformers4 oldest format lint deploy-checks
	@$(MAKE) --no-print-directory test || $(AGAIN)
	@$(MAKE) --no-print-directory bench-quick

.venv-mutants/.ready:
	$(PYTHON) -m venv .venv-mutants
	.venv-mutants/bin/python -m pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0 pytest hypothesis
	@touch $@

mutants: .venv-mutants/.ready ## Run mutation tests of the core; list surviving mutants (30 minutes)
	rm -rf build/mutants && mkdir -p build/mutants/rollout_server build/mutants/tests
	touch build/mutants/rollout_server/__init__.py
	cp -r server/rollout_server/core build/mutants/rollout_server/
	cp -r tests/__init__.py tests/core tests/support build/mutants/tests/
	cd build/mutants && export PATH="$(CURDIR)/.venv-mutants/bin:$$PATH" PYTHONPATH="$(CURDIR)/build/mutants" \
		PYTHONDONTWRITEBYTECODE=1 ROLLOUT_EXAMPLES=few && cp tests/core/mutants.toml . \
		&& cosmic-ray init mutants.toml mutants.sqlite && cr-filter-operators mutants.sqlite mutants.toml \
		&& cosmic-ray baseline mutants.toml && cosmic-ray exec mutants.toml mutants.sqlite \
		&& cr-report --surviving-only --show-diff mutants.sqlite

mutants-tokens: setup .venv-mutants/.ready ## Run mutation tests of the renderer; list surviving mutants (1 hour)
	rm -rf build/mutants-tokens && mkdir -p build/mutants-tokens/tests/edge && ln -sfn ../../shared build/shared
	cp -r server/rollout_server build/mutants-tokens/
	cp -r tests/__init__.py tests/support build/mutants-tokens/tests/
	cp -r tests/edge/__init__.py tests/edge/tokens build/mutants-tokens/tests/edge/
	cd build/mutants-tokens && export PATH="$(CURDIR)/.venv-mutants/bin:$$PATH" PYTHONPATH="$(CURDIR)/build/mutants-tokens" \
		PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false && cp tests/edge/tokens/mutants.toml . \
		&& cosmic-ray init mutants.toml mutants.sqlite && cr-filter-operators mutants.sqlite mutants.toml \
		&& { $(CURDIR)/$(BIN)/python -m tests.edge.tokens.forks serve forks.sock >forks.log 2>&1 & } && trap "kill $$!" EXIT \
		&& cosmic-ray baseline mutants.toml && cosmic-ray exec mutants.toml mutants.sqlite \
		&& cosmic-ray baseline mutants.toml && cr-report --surviving-only --show-diff mutants.sqlite

clean: ## Delete environments and caches
	rm -rf .venv .venv-protos .venv-oldest .venv-transformers4 .venv-templates .venv-clients .venv-trl .venv-verl .venv-mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist examples/tool_server_node/node_modules
