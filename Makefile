# Every target sets up what it needs: a fresh checkout needs only Python 3.11.4-3.14, and the network or a warm cache.
PYTHON ?= python3
BIN := .venv/bin
# For example: make test PYTEST_ARGS="tests/agent -k outbox"
PYTEST_ARGS ?=
BENCH_ARGS ?=
# The backend of the demo's nodes: local or kubernetes.
BACKEND ?= local
# Two processes for each core, since tests mostly wait; tests/support/selection.py groups tests by what they need.
SIDE_BY_SIDE := -n $(shell $(PYTHON) -c "import os; print(max((os.cpu_count() or 1) * 2, 2))")
# Another order in each run of CI, which prints its seed.
ORDER := $(if $(CI),-p pytest_randomly --randomly-dont-reset-seed)
PYTEST := $(BIN)/python -m pytest $(ORDER)
USUAL_TESTS := $(SIDE_BY_SIDE) --long=without --cluster=without
# For example: make test-again N=10 LOAD=2
N ?= 10
LOAD ?= 0
# The long tests to run: `only` for all of them, or one group (tests/support/selection.py names them).
GROUP ?= only
# Lets Python cache bytecode: otherwise each of the thousands of processes that targets start compiles its modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-roles test test-cluster test-again test-long test-failed test-torch-floor test-gpu check check-api format lock bench-recovery bench-warm bench-kubernetes bench-oncall bench-chaos bench-faults bench-step-times bench-history bench-gateway bench-checkpoint bench-state bench-shards bench-store bench-roles bench-ray bench-scaling bench-checks bench-events bench-ui picture cluster cluster-down cluster-binaries docs kustomize clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1|\2/' | column -t -s '|'

setup:  ## Create .venv from the lock and fetch the Temporal binary, where missing
	@$(PYTHON) scripts/setup.py

demo: setup  ## Train on three nodes while ranks, nodes, worker and server are killed; BACKEND=kubernetes: on pods
	@$(BIN)/python -m examples.demo --backend $(BACKEND)

demo-roles: setup  ## Reinforcement learning of three roles, each of whose nodes is killed in turn
	@$(BIN)/python -m examples.demo.roles

test: check  ## Static checks, then the tests that need no cluster, browser or built program; PYTEST_ARGS: those it names
ifeq ($(PYTEST_ARGS),)
	@$(PYTEST) $(USUAL_TESTS)
else
	@$(PYTEST) $(PYTEST_ARGS)
endif

test-cluster: setup  ## The tests that need a real Kubernetes cluster (Linux, root), a browser, or programs that Go builds
	@$(PYTEST) $(SIDE_BY_SIDE) --long=without --cluster=only $(PYTEST_ARGS)

test-again: setup  ## The tests of `make test`, N times beside LOAD busy loops; names each test that ever failed
	@$(BIN)/python -m scripts.test_again --times $(N) --load $(LOAD) -- $(USUAL_TESTS) $(PYTEST_ARGS)

test-long: setup  ## The long tests: whole matrices of launchers, frameworks, scripts and cluster faults; GROUP=NAME: one
	@$(PYTEST) $(SIDE_BY_SIDE) --long=$(GROUP)

test-failed: setup  ## The tests that failed in the last run, one after another
	@$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

test-torch-floor: setup  ## Recovery with the oldest PyTorch that pyproject.toml allows (7 GB, once)
	@$(BIN)/python -m scripts.torch_floor

test-gpu: setup  ## What only a machine with a GPU of NVIDIA's can show; fails without one
	@$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

check: setup  ## Formatting, lint, import layering, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/pyrefly check --output-format min-text

check-api: setup  ## The types of the public API, as users' pyright reads them
	@$(BIN)/python -m scripts.public_types

format: setup  ## Fix formatting and lint errors where that is safe
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock:  ## Resolve requirements.lock again
	@$(PYTHON) scripts/setup.py lock

bench-recovery: setup  ## Time from a kill to the next step: torchrun, DLRover and Perdure in one run
	@$(BIN)/python -m benchmarks.recovery $(BENCH_ARGS)

bench-warm: setup  ## Warm and cold starts of ranks, beside the peers; kinds of scripts; costs of warm starts
	@$(BIN)/python -m benchmarks.warm $(BENCH_ARGS)

bench-kubernetes: setup  ## Faults of a cluster, and a job of a thousand nodes (Linux, root)
	@$(BIN)/python -m benchmarks.kubernetes $(BENCH_ARGS)

bench-oncall: setup  ## What a cluster and its administrators do to jobs, and what is said and left (Linux, root)
	@$(BIN)/python -m benchmarks.oncall $(BENCH_ARGS)

bench-chaos: setup  ## Random, overlapping faults on third-party programs: right results, no hang, true explanations
	@$(BIN)/python -m benchmarks.chaos $(BENCH_ARGS)

bench-faults: setup  ## Known faults one at a time: found how soon, class, culprit and repair as they must be
	@$(BIN)/python -m benchmarks.faults $(BENCH_ARGS)

bench-step-times: setup  ## What it costs ranks that their steps are split into computation and waiting, paired in one run
	@$(BIN)/python -m benchmarks.step_times $(BENCH_ARGS)

bench-history: setup  ## History of an idle job; signals and leases while a group continues as new
	@$(BIN)/python -m benchmarks.history $(BENCH_ARGS)

bench-checkpoint: setup  ## How long a save stops the training: in memory, by PyTorch's own ways, by DLRover's
	@$(BIN)/python -m benchmarks.checkpoint $(BENCH_ARGS)

bench-state: setup  ## A split state continues in worlds of other sizes: from memory, from storage, by PyTorch's DCP
	@$(BIN)/python -m benchmarks.state $(BENCH_ARGS)

bench-gateway: setup  ## A thousand agents through one gateway: latency, processor, memory, leases while it is away
	@$(BIN)/python -m benchmarks.gateway $(BENCH_ARGS)

bench-shards: setup  ## Shards a second through one dataset, how long a rank waits for one, the size of its state
	@$(BIN)/python -m benchmarks.shards $(BENCH_ARGS)

bench-store: setup  ## Calls a second through the key-value store of one job, and how long a rank waits for one
	@$(BIN)/python -m benchmarks.store $(BENCH_ARGS)

bench-roles: setup  ## Each role's rank and node killed: seconds to work again, what else restarts, what is lost or twice
	@$(BIN)/python -m benchmarks.roles $(BENCH_ARGS)

bench-ray: setup  ## On a Ray cluster: ranks and machines killed, beside Ray Train; many actors start and are whole again
	@$(BIN)/python -m benchmarks.ray $(BENCH_ARGS)

bench-scaling: setup  ## Jobs that choose their number of nodes by speed, against known laws; clusters that share their nodes
	@$(BIN)/python -m benchmarks.scaling $(BENCH_ARGS)

bench-checks: setup  ## How much later a job starts with preflight, how much longer steps with replays take
	@$(BIN)/python -m benchmarks.checks $(BENCH_ARGS)

bench-events: setup  ## What telemetry costs: an event, a training step, and with --fleet a job of many nodes
	@$(BIN)/python -m benchmarks.events $(BENCH_ARGS)

bench-ui: setup  ## How soon the page shows 500 jobs and what changes, what ten pages cost, and commands
	@$(BIN)/python -m benchmarks.ui $(BENCH_ARGS)

picture: setup  ## The README's pictures, from real runs: steps under the same faults, and a terminal (5 minutes)
	@$(BIN)/python -m benchmarks.picture $(BENCH_ARGS)

cluster: setup  ## Start a real Kubernetes cluster on this machine (Linux, root), for tests and demo
	@$(BIN)/python -m scripts.cluster up

cluster-down: setup  ## End the cluster and undo every change to the machine
	@$(BIN)/python -m scripts.cluster down

cluster-binaries: setup  ## Build or find the cluster's programs, without starting anything
	@$(BIN)/python -m scripts.cluster binaries

docs: setup  ## Write the generated pages of docs, such as spec.md and cli.md, and the dashboards in deploy/grafana
	@$(BIN)/python -m scripts.docs
	@$(BIN)/python -m scripts.dashboards

kustomize: setup  ## Write the bases below deploy/kustomize from the Helm chart
	@$(BIN)/python -m scripts.kustomize

clean:  ## Remove what set-up and tests left in the checkout; the caches outside it stay
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis benchmarks/*/out
