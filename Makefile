PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without a working NVIDIA driver, the constraints pick the release of torch that is tested on CPUs.
CONSTRAINTS := $(shell nvidia-smi >/dev/null 2>&1 || echo "-c constraints-cpu.txt")
READY := $(VENV)/.ready

.PHONY: help demo test lint bench clean

help:
	@echo "make demo   set up, train a small GPT in BF16 and in FP8 on real text, compare"
	@echo "make test   set up, lint, check types, run all tests"
	@echo "make lint   set up, lint and check types only"
	@echo "make bench  benchmarks of the kernels (needs a Hopper GPU)"
	@echo "make clean  remove the virtual environment and what runs left"

$(READY): pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/ampplug demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -n 2 -m "not gpu"

bench: $(READY)
	@nvidia-smi >/dev/null 2>&1 || { echo "make bench needs an NVIDIA GPU of compute capability 8.9 or higher; there is none here"; exit 1; }
	$(BIN)/python benchmarks/kernels.py

clean:
	rm -rf $(VENV) runs build *.egg-info
