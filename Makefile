# make demo and make test do all the set-up by themselves; `make PYTHON=/path/to/python3 ...` chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
MATRIX ?= 2.11.0 2.15.0

bin := $(VENV)/bin
export TORCH_NHWC_VENV := $(VENV)
sources := $(shell find csrc torch_nhwc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh') setup.py pyproject.toml

.PHONY: demo test lint bench matrix test-emulated test-cuda clean

demo: $(VENV)/built
	$(bin)/python -m torch_nhwc demo

# Two at a time: most tests keep one core busy, and many compile.
test: $(VENV)/built
	$(bin)/python -m pytest --numprocesses 2

lint: $(VENV)/built
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

# Take the machine for yourself meanwhile: half an hour, 12 GB of memory.
bench: $(VENV)/built
	$(bin)/python benchmarks/bench_weights.py
	$(bin)/python benchmarks/bench_models.py
	$(bin)/python benchmarks/bench_forward.py
	$(bin)/python benchmarks/bench_walk.py
	$(bin)/python benchmarks/report.py

# The other supported versions of torch, each in an environment of its own; they download CUDA builds.
matrix: $(addprefix matrix-,$(MATRIX))

matrix-%:
	$(MAKE) test VENV=.matrix/$* TORCH=$*

# SSE2 on an old CPU and NEON on 64-bit Arm, under qemu; fails where qemu-user or the cross compiler are missing.
test-emulated: $(VENV)/built
	TORCH_NHWC_REQUIRE_QEMU=1 $(bin)/python -m pytest -m emulated

# Everything that needs a GPU, and nothing else; fails where there is none.
test-cuda: $(VENV)/built
	TORCH_NHWC_REQUIRE_GPU=1 $(bin)/python -m pytest -m cuda

clean:
	rm -rf $(VENV) .matrix build dist *.egg-info torch_nhwc/libtorch_nhwc*.so torch_nhwc/build_info.json

$(VENV)/installed: pyproject.toml tools/make_environment.py
	$(PYTHON) tools/make_environment.py $(VENV) --torch $(TORCH)
	touch $@

$(VENV)/built: $(VENV)/installed $(sources)
	$(bin)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@
