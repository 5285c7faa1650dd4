# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test lint format bench bench-operator e2e images manifests lock clean
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(INSTALLED): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8,<1'
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --requirement requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

demo: $(INSTALLED) ## see it work: real sessions, a gateway killed in mid-run, a plot
	@$(BIN)/dps demo

test: $(INSTALLED) ## every test that needs no cluster and no GPU
	@$(BIN)/python -m dps_lab.workload.assets
	@$(BIN)/python -m pytest

lint: $(INSTALLED) ## format, lint, types, import layers
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(INSTALLED) ## put the code in shape
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(INSTALLED) ## the request path beside its peers, what tracing costs, and (where Go is) the operator
	@$(BIN)/python -m dps_lab.bench
	@if command -v go >/dev/null; then $(MAKE) --no-print-directory bench-operator; else echo "no Go: no operator's figures"; fi

bench-operator: $(INSTALLED) ## 300 DPSRouters and one operator on a real API server: time, memory, calls
	@e2e/cluster/build control-plane
	@$(BIN)/python -m e2e.cluster.bench

e2e: $(INSTALLED) ## real clusters, SGLang, traces and metrics, under faults; see e2e/README.md
	@e2e/cluster/build $$([ "$$(id -u)" = 0 ] || echo control-plane)
	@$(BIN)/python -m pytest e2e --timeout 600 --tb short

images: ## both images by buildah, and their commands run once
	@e2e/build-images

manifests: $(INSTALLED) ## write what follows from the API's models and the chart
	@$(BIN)/python -m dps_operator.generate
	@e2e/cluster/build helm
	@e2e/cluster/install-manifest > manifests/install.yaml

lock: ## write requirements.lock anew from pyproject.toml
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-emit-index-url --no-annotate \
		--extra dev pyproject.toml --output-file requirements.lock

clean: ## remove what the Makefile made
	rm -rf $(VENV)
