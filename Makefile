PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/osmosis/*/v1/*.proto)

.PHONY: help setup demo test check format lint types contract fresh house bench protos release-protos lock clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.ready: requirements/dev.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.venv-protos/.ready: requirements/protos.lock
	$(PYTHON) -m venv .venv-protos
	.venv-protos/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

.venv-oldest/.ready: requirements/oldest.lock
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

setup: $(VENV)/.ready ## Make the environment from the lock

protos: .venv-protos/.ready ## Write generated/ from protos/
	find generated -name '*_pb2*' -delete
	PATH="$(CURDIR)/.venv-protos/bin:$$PATH" .venv-protos/bin/python -m grpc_tools.protoc -I protos \
		--python_out=generated --grpc_python_out=generated --mypy_out=quiet:generated --mypy_grpc_out=quiet:generated $(PROTOS)
