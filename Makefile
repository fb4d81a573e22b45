# Every target sets up what it needs; scripts/setup.sh installs system packages where it may.

PYTHON ?= python3
ARGS ?=
# Tests run side by side, each file in one process; they wait more than they compute.
WORKERS ?= 3
BIN := .venv/bin
SETUP := PYTHON=$(PYTHON) scripts/setup.sh
SERVERS := postgresql mariadb spark chromium ws proxies kafka iceberg rabbitmq nats redis promtool
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help demo test faults nightly check format docs protos bench soak clean

help:
	@echo "make demo     watch a database's changes flow into Delta tables (ARGS='--seconds 20')"
	@echo "make test     run the tests (ARGS='-k log')"
	@echo "make faults   run the long ones: kills, outages, full disks, clusters"
	@echo "make nightly  run both, with more examples and more seeds"
	@echo "make check    formatting, lint, types, layers, generated docs and code"
	@echo "make format   rewrite the code in the project's format"
	@echo "make docs     write the generated docs again"
	@echo "make protos   write the code of the .proto again"
	@echo "make soak     an hour under load with restarts; ARGS='--minutes 10' for less"
	@echo "make bench    measure beside Debezium, pg_recvlogical and delta-rs, into bench/RESULTS.md"
	@echo "make clean    remove everything that was built"

demo: .venv/.installed-demo
	@$(if $(findstring --no-lake,$(ARGS)),,$(SETUP) spark)
	@$(BIN)/headrace demo $(ARGS)

test: .venv/.installed-dev
	@$(SETUP) $(SERVERS)
	@$(PYTEST) -m 'not faults and not nightly' $(ARGS)

faults: .venv/.installed-dev
	@$(SETUP) $(SERVERS) delta s3a
	@$(PYTEST) -m 'faults and not nightly' $(ARGS)

nightly: .venv/.installed-dev
	@$(SETUP) $(SERVERS) delta s3a
	@HEADRACE_NIGHTLY=1 $(PYTEST) $(ARGS)

check: .venv/.installed-dev
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/docs.py --check
	@$(BIN)/python scripts/protos.py --check

format: .venv/.installed-dev
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format

docs: .venv/.installed-dev
	@$(BIN)/python scripts/docs.py

protos: .venv/.installed-dev
	@$(BIN)/python scripts/protos.py

bench: .venv/.installed-bench
	@$(SETUP) java mariadb kafka rabbitmq nats redis
	@$(BIN)/python -m bench $(ARGS)

soak: .venv/.installed-bench
	@$(SETUP) postgresql java redis
	@$(BIN)/python -m bench.soak $(ARGS)

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests bench scripts -name __pycache__ -prune -exec rm -rf {} +

.venv/.created:
	@$(SETUP) python
	@echo "setup: creating .venv"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.installed-%: .venv/.created pyproject.toml
	@echo "setup: installing headrace[$*] and what it needs into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
