# make demo   a real pretraining run on this machine, from nothing: environment, corpus, training, report, sample text
# make test   the tests                       make test-all   the long tests too, in parts: an interrupted run goes on
# make test-sample   a sample of the long tests: SAMPLE_S seconds of them, drawn by SEED
# make rough  the quick set, paused at random and with AVX2 only
# make check  ruff, types, the map            make bench      what the trainer costs, counted
# make bench-gpu  what one GPU does: right gradients, rates, headline rows, kernels, the real train, faults, losses, a peer's row
# make docs   what docs/ takes from the source, and its site in build/site
# make lock       requirements.lock from .venv; make lock-check: do its wheels exist?

PY := .venv/bin/python
WINDLASS := .venv/bin/windlass

.PHONY: demo test test-long test-sample test-all long-seconds rough check bench bench-gpu docs lock lock-check environment

environment: .venv/stamp

.venv-flyte/stamp: .venv/stamp scripts/flyte_environment.sh
	@sh scripts/flyte_environment.sh

.venv-sky/stamp: .venv/stamp scripts/sky_environment.sh
	@sh scripts/sky_environment.sh

.venv-site/stamp: .venv/stamp scripts/site_environment.sh
	@sh scripts/site_environment.sh

.venv-mosaic/stamp: .venv/stamp scripts/mosaic_environment.sh
	@sh scripts/mosaic_environment.sh

.venv-litgpt/stamp: .venv/stamp scripts/litgpt_environment.sh
	@sh scripts/litgpt_environment.sh

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

# three files at a time on two cores: a test of ranks leaves cores idle while it waits
test: .venv/stamp
	$(PY) -m pytest -n 3 --dist loadfile

test-long: .venv/stamp
	$(PY) -m pytest --long -m long -n 2 --dist worksteal

SAMPLE_S := 1800
SEED := 0
test-sample: .venv/stamp
	$(PY) -m pytest --long-sample $(SAMPLE_S) --seed $(SEED) -n 2 --dist worksteal

test-all: .venv/stamp .venv-flyte/stamp .venv-sky/stamp .venv-site/stamp .venv-mosaic/stamp .venv-litgpt/stamp
	@sh scripts/test_programs.sh
	$(PY) scripts/test_all.py

long-seconds:  # what test-all measured, for the next samples
	cp build/test-all/long_seconds.json tests/long_seconds.json

rough: .venv/stamp
	bash scripts/rough_weather.sh

check: .venv/stamp
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m pytest tests/test_map.py

bench: .venv/stamp
	$(PY) benchmarks/overhead.py
	$(PY) benchmarks/loader.py

MINUTES := 9
bench-gpu: .venv/stamp  # a cell that fails in one script does not keep the others from their GPU time
	@code=0; for script in gradients:5 ground_truth:$(MINUTES) headline:$(MINUTES) kernels:5 train:5 ladder:$(MINUTES) faults:4 learning:12 peer:5; do \
		PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True $(PY) benchmarks/gpu/$${script%:*}.py --minutes $${script#*:} || code=1; \
	done; exit $$code

docs: .venv/stamp .venv-site/stamp
	$(PY) docs/generate/build.py
	.venv-site/bin/sphinx-build --quiet --nitpicky --fail-on-warning --keep-going -c docs/site docs build/site

lock: .venv/stamp
	$(PY) scripts/lock.py write

lock-check: .venv/stamp
	$(PY) scripts/lock.py check
