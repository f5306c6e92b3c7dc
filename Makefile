# make train: create .venv with what training requires, and train the sample config.
# make test: add what exporting and the tests require, and run them; make test-all: the slow ones too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Memory in huge pages, with glibc 2.35 or newer; see training/devices/huge_pages.py.
ifneq ($(RAWTREE_HUGE_PAGES),0)
ifeq ($(findstring glibc.malloc.hugetlb,$(GLIBC_TUNABLES)),)
export GLIBC_TUNABLES := $(GLIBC_TUNABLES:%=%:)glibc.malloc.hugetlb=1
endif
endif

.PHONY: train check test test-all test-newest torture lint format schema clean

train: $(VENV)/train.done
	$(BIN)/python train.py -c config.json

check: $(VENV)/train.done
	$(BIN)/python train.py -c config.json --check

test: $(VENV)/test.done
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(VENV)/test.done
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not torture"

# The tests with the newest JAX that works: make test-newest PYTHON=python3.13
test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -r tests/newest.txt
	.venv-newest/bin/python -m pytest -n 2 --dist worksteal

torture: $(VENV)/test.done
	$(BIN)/python -m pytest -n 2 --dist worksteal -m torture --ignore tests/test_survival.py
	KILLS=300 $(BIN)/python -m pytest -n 2 --dist worksteal -m "torture or not torture" tests/test_survival.py

lint: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error

format: $(VENV)/test.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(VENV)/train.done
	$(BIN)/python -m wiring.schema
	$(BIN)/python -m wiring.parts_page

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "Rawtree needs Python 3.11 to 3.13, found %d.%d; choose another one with make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/train.done: training/requirements.txt requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r training/requirements.txt
	touch $@

$(VENV)/test.done: requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-newest .pytest_cache .ruff_cache
