# On a fresh machine start with `make demo` and `make test`; `make help` lists all targets.
PYTHON ?= python3
ROUTERS ?= 1000
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test lint audit format bench bench-operator grid e2e e2e-paper-engines images release generate lock clean
help: ## list all targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(INSTALLED): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8,<1'
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --requirement requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

demo: $(INSTALLED) ## replay real sessions, kill a gateway during the run, and plot the routing decisions
	@$(BIN)/dps demo

test: $(INSTALLED) ## run the unit and integration tests; no cluster and no GPU needed
	@$(BIN)/python -m dps_lab.workload.assets
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadscope

lint: $(INSTALLED) ## check formatting, lint rules, types and import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

audit: $(INSTALLED) ## check the locked dependencies for known vulnerabilities; needs PyPI
	@$(BIN)/python -m dps_tools.audit

format: $(INSTALLED) ## format the code and fix what ruff can fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(INSTALLED) ## benchmark the request path against other routers, tracing and, if Go is installed, the operator
	@$(BIN)/python -m dps_lab.bench
	@if command -v go >/dev/null; then $(MAKE) --no-print-directory bench-operator; else echo "Go is not installed: skipping bench-operator"; fi

bench-operator: $(INSTALLED) ## benchmark one operator with 1,000 DPSRouters, or ROUTERS, on a real API server
	@e2e/cluster/build control-plane
	@$(BIN)/python -m e2e.cluster.bench $(ROUTERS)

grid: $(INSTALLED) ## compare the policy Adaptive with the other policies and other fleets in simulations; takes hours
	@$(BIN)/python -m dps_lab.simulate.grid_cli

e2e: $(INSTALLED) ## run the end-to-end tests with real Kubernetes, SGLang, Phoenix and Prometheus; see e2e/README.md
	@e2e/cluster/build $$([ "$$(id -u)" = 0 ] || echo control-plane)
	@e2e/run

e2e-paper-engines: $(INSTALLED) ## install vLLM (6 GB) and run the tests with the paper's other engines, vLLM and Transformers
	@e2e/paper_engines/install
	@e2e/cluster/build
	@$(BIN)/python -m pytest e2e/paper_engines e2e/node/test_vllm_pods.py --timeout 600 --tb short

images: ## build the container images with buildah and run the command of each once
	@e2e/build-images

release: $(INSTALLED) images ## write images, chart, manifests, wheel, SBOMs and checksums to build/release; publishes nothing
	@e2e/cluster/build helm
	@$(BIN)/python -m dps_tools.release "$${CLUSTER_BIN:-$$HOME/.cache/dps-router/cluster/bin}/helm" build/release

generate: $(INSTALLED) ## write every generated file: the CRD, its reference, install.yaml, test fixtures
	@$(BIN)/python -m dps_tools.generate

lock: ## write requirements.lock with the newest versions that pyproject.toml allows
	@$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-emit-index-url --no-annotate \
		--extra dev pyproject.toml --output-file requirements.lock

clean: ## remove the virtual environment
	rm -rf $(VENV)
