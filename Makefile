# Everything a developer types. `make` alone says what there is.

PYTHON ?= python3
# What pip installs for torch. The build for the CPU alone is much smaller:
# make demo TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0

# Most tests wait for a camera, a browser or a process: five at a time keep two cores busy. A module's tests stay together,
# since they share what is slow to start.
PYTEST ?= -n 5 --dist loadfile --no-loadscope-reorder

# Compiling the sources again in each of hundreds of processes would cost minutes.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
INSTALLED := $(VENV)/.installed
DEMO := out/demo.mp4

.PHONY: help demo test test-fast test-changed test-gpu lint lock docs image-test clean

help:
	@echo 'make demo    find people in the clip that ships with the project → $(DEMO)'
	@echo 'make test    run the tests'
	@echo 'make test-fast     the tests that start no process, camera, broker, browser or model'
	@echo 'make test-changed  the tests that changes since BASE=main can reach by imports'
	@echo 'make test-gpu  the same for what runs on a GPU: self-check, golden set, CUDA tests'
	@echo 'make lint    ruff and mypy'
	@echo 'make docs    build the documentation: out/site'
	@echo 'make lock    resolve requirements.lock again: the versions that `make` and the image install'
	@echo 'make image-test  build the image with Docker and run it; check the Helm chart (needs Docker, helm)'
	@echo 'make clean   remove $(VENV), out/ and caches'

# The stamps make a second call instant; a changed pyproject.toml or lock makes them stale.
$(BASE): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "saccade needs Python 3.11 or later; name one with PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing $(firstword $(TORCH)) and Saccade into $(VENV): downloads 3 GB (CPU build of torch: 0.4 GB), takes 3 to 15 minutes'
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -c requirements.lock -e .
	@touch $@

# What the tests, the linters and the documentation need in addition.
$(INSTALLED): $(BASE)
	@echo 'Installing the tools for tests and documentation into $(VENV): downloads 0.2 GB, takes 2 to 5 minutes'
	$(BIN)/python -m pip install --quiet -c requirements.lock -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps moondream==2.6.1  # its HTTP client; the rest of it is for inference
	@touch $@

demo: $(BASE)
	@mkdir -p $(dir $(DEMO))
	$(BIN)/saccade run pipeline/assets/demo.mp4 --detect person --out $(DEMO)
	@echo 'The annotated video: $(DEMO)'

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST)

test-fast: $(INSTALLED)
	$(BIN)/python -m pytest -q -m 'not slow' -n 2 --dist loadfile

BASE ?= main
test-changed: $(INSTALLED)
	@tests=$$($(BIN)/python .ci/changed.py $(BASE)) || exit 1; \
	if test -z "$$tests"; then echo 'no test can reach the changes'; else $(BIN)/python -m pytest $(PYTEST) $$tests; fi

# All three run, whatever the first finds; it fails where there is no GPU, on which the tests would only be skipped.
test-gpu: $(INSTALLED)
	@failed=; \
	$(BIN)/saccade doctor --gpu || failed="$$failed doctor"; \
	$(BIN)/saccade golden tests/data/golden-tiny --device cuda || failed="$$failed golden"; \
	$(BIN)/python -m pytest -m gpu || failed="$$failed tests"; \
	test -z "$$failed" || { echo "failed on this GPU:$$failed"; exit 1; }

lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# Torch is left out, with what it alone brings: its builds for a CPU and for CUDA differ.
lock: $(INSTALLED)
	echo '$(firstword $(TORCH))' >$(VENV)/torch.txt
	$(BIN)/python -m uv pip compile -q pyproject.toml --all-extras --universal --upgrade -c $(VENV)/torch.txt \
		--no-annotate --custom-compile-command 'make lock' | grep -vE '^(torch|triton|nvidia-|cuda-)' >$(VENV)/lock
	mv $(VENV)/lock requirements.lock

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo 'The documentation: out/site/index.html'

image-test: $(INSTALLED)
	$(BIN)/python -m pytest -m image

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
