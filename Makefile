# make demo   a real pretraining run on this machine, from nothing: environment, corpus, training, report, sample text
# make test   the tests                       make test-all   the long matrices too
# make check  ruff, types, the map            make bench      what the trainer costs, counted
# make docs   docs/recipe.md, docs/errors.md  make lock       requirements.lock from .venv; make lock-check: do its wheels exist?

PY := .venv/bin/python
WINDLASS := .venv/bin/windlass

.PHONY: demo test test-long test-all check bench docs lock lock-check environment

environment: .venv/stamp

.venv/stamp: requirements.lock pyproject.toml scripts/environment.sh
	@sh scripts/environment.sh

demo: .venv/stamp
	@echo "== 1/4 train: a million parameters learn the shape of Python from its standard library"
	$(WINDLASS) train recipes/demo.yaml --nproc auto
	@echo "== 2/4 generate: one prompt at step 0, early, and at the end"
	$(WINDLASS) generate runs/demo --step 0 --step 100 --step 800 --prompt "class Reader:" --record
	@echo "== 3/4 export: a Hugging Face directory, loaded back and compared"
	$(WINDLASS) export runs/demo
	@echo "== 4/4 report: open it in a browser"
	$(WINDLASS) report runs/demo

test: .venv/stamp
	$(PY) -m pytest

test-long: .venv/stamp
	$(PY) -m pytest --long -m long

test-all: test test-long

check: .venv/stamp
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m pytest tests/test_map.py

bench: .venv/stamp
	$(PY) benchmarks/overhead.py
	$(PY) benchmarks/loader.py

docs: .venv/stamp
	$(PY) docs/build.py

lock: .venv/stamp
	$(PY) scripts/lock.py write

lock-check: .venv/stamp
	$(PY) scripts/lock.py check
