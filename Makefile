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
	@echo "== demo: pretraining on Python's standard library, recipes/demo.yaml"
	$(WINDLASS) train recipes/demo.yaml --nproc auto
	@echo "== demo: one prompt's continuation at steps 0, 200 and last"
	$(WINDLASS) generate runs/demo --record --prompt "class " --prompt '"""Return' --step 0 --step 200 --step 1200
	@echo "== demo: Hugging Face export, loaded back and compared"
	$(WINDLASS) export runs/demo
	@echo "== demo: report"
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
