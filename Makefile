# On a fresh machine start with `make demo` and `make test`; `make help` lists all targets.
PYTHON ?= python3
ROUTERS ?= 1000
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Tests and the demo start hundreds of processes. Without cached bytecode, each would compile all modules that it imports.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo test lint audit format bench bench-operator e2e e2e-vllm images release generate lock clean
help: ## list all targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(INSTALLED): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8,<1'
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --requirement requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

demo: $(INSTALLED) ## compare fleets in simulation, kill a gateway during a replay, and plot both
	@$(BIN)/dps demo

test: $(INSTALLED) ## run the unit and integration tests; no cluster and no GPU needed
	@$(BIN)/python -m dps_lab.workload.assets
	@# The modules that take longest come first, so that the processes finish at about the same time.
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder \
		tests/test_documents.py tests/integration tests

lint: $(INSTALLED) ## check formatting, lint rules, types and import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

audit: $(INSTALLED) ## check the locked dependencies for known vulnerabilities; needs PyPI
	@$(BIN)/uv tool run "pip-audit>=2.10,<3" --requirement requirements.lock --no-deps --disable-pip --progress-spinner off

format: $(INSTALLED) ## format the code and fix what ruff can fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(INSTALLED) ## benchmark the request path beside vllm-router and LiteLLM and, if Go is installed, the operator
	@$(BIN)/python -m dps_lab.bench
	@if command -v go >/dev/null; then $(MAKE) --no-print-directory bench-operator; else echo "Go is not installed: skipping bench-operator"; fi

bench-operator: $(INSTALLED) ## benchmark one operator with 1,000 DPSRouters, or ROUTERS, on a real API server
	@e2e/cluster/build control-plane
	@$(BIN)/python -m e2e.cluster.bench $(ROUTERS)

e2e: $(INSTALLED) ## run the end-to-end tests with real Kubernetes, SGLang, Phoenix and Prometheus; see e2e/README.md
	@e2e/cluster/build $$([ "$$(id -u)" = 0 ] || echo control-plane)
	@e2e/run

e2e-vllm: $(INSTALLED) ## install vLLM (6 GB) and run the tests with it
	@e2e/vllm/install
	@$(BIN)/python -m pytest e2e/vllm --timeout 600 --tb short

images: ## build the container images with buildah and run the command of each once
	@e2e/build-images

release: $(INSTALLED) images ## write images, chart, manifests, wheel, SBOMs and checksums to build/release; publishes nothing
	@e2e/cluster/build helm
	@$(BIN)/python -m dps_tools.release "$${CLUSTER_BIN:-$$HOME/.cache/dps-router/cluster/bin}/helm" build/release

generate: $(INSTALLED) ## write the generated files: the CRD and test fixtures
	@$(BIN)/python -m dps_tools.generate

lock: ## write requirements.lock with the newest versions that pyproject.toml allows
	@$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-emit-index-url --no-annotate \
		--extra dev pyproject.toml --output-file requirements.lock

clean: ## remove the virtual environment
	rm -rf $(VENV)
