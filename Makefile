PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
# Without a working NVIDIA driver, the constraints pick the release of torch that is tested on CPUs.
CONSTRAINTS := $(if $(GPU),,-c constraints-cpu.txt)
READY := $(VENV)/.ready

.PHONY: help demo test lint bench clean

help:
	@echo "make demo   set up, train a small GPT in BF16 and in FP8 on real text, compare"
	@echo "make test   set up, lint, check types, run all tests (those of the GPU too where there is one)"
	@echo "make lint   set up, lint and check types only"
	@echo "make bench  benchmarks of the kernels, of the host's time and of a whole training step, also by other libraries (needs a GPU with FP8 units)"
	@echo "make clean  remove the virtual environment and what runs left"

$(READY): pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e ".[dev]"
	# DeepSpeed's set-up needs the torch that is installed; its own kernels are built when used, if ever
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation $(CONSTRAINTS) -e ".[deepspeed]"
	touch $@

demo: $(READY)
	$(BIN)/ampplug demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
ifdef GPU
	$(BIN)/python -m pytest -q -n 2 -m "not gpu"
	$(BIN)/python -m pytest -q -m gpu  # in one process: they share the GPU's memory
else
	$(BIN)/python -m pytest -q -n 2
endif

bench:
ifdef GPU
	@$(MAKE) --no-print-directory $(READY)
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/host_time.py
	-for batch in 1 8; do for modes in bf16,o1,o2 bf16,te bf16,torchao; do \
		$(BIN)/python benchmarks/train_step.py --micro-batch $$batch --modes $$modes; done; done
	$(BIN)/python benchmarks/train_step.py --summary
else
	@echo "make bench needs an NVIDIA GPU of compute capability 8.9 or higher; nvidia-smi finds none here" >&2
	@exit 1
endif

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
