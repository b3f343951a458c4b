# make demo and make test do all the set-up by themselves; `make PYTHON=/path/to/python3 ...` chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
# The version of torch, where not any that the interpreter has will do.
TORCH ?=
MATRIX ?= 2.11.0 2.13.0 2.14.1 2.15.0
SANITIZER ?= $(firstword $(shell command -v compute-sanitizer) \
  $(wildcard $(CUDA_HOME)/bin/compute-sanitizer /usr/local/cuda/bin/compute-sanitizer))

bin := $(VENV)/bin
# Each starts with half of the tests, so that what a file's tests share is mostly made once.
two := --numprocesses 2 --dist worksteal
# Programs of packages, such as ninja, wherever the packages are: here, or beside an interpreter that PATH does not name.
beside := $(if $(findstring /,$(PYTHON)),:$(patsubst %/,%,$(dir $(abspath $(PYTHON)))))
export PATH := $(PATH):$(abspath $(bin))$(beside)
sources := $(shell find csrc torch_nhwc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh') setup.py pyproject.toml

.PHONY: demo test test-all test-exhaustive test-avx2 lint fuzz docs site site-serve bench bench-peers wheel wheels matrix test-emulated test-cuda gpu-check bench-cuda sanitize-cuda clean

demo: $(VENV)/built
	$(bin)/python examples/demo.py

# Every behaviour, in 8 minutes on two cores. Two at a time: most tests keep one core busy, and many compile.
test: $(VENV)/has-test $(VENV)/built
	$(bin)/python -m pytest $(two) -m "not exhaustive"

# Every case of it as well: sanitizers, every instruction set, emulated CPUs, long generated runs.
test-all: test test-exhaustive

# What `make test` leaves out, and nothing else.
test-exhaustive: $(VENV)/has-test $(VENV)/built
	$(bin)/python -m pytest $(two) -m exhaustive

# `make test` as on a CPU without AVX-512; where this CPU has none, `make test` has done it. Left out are tests that choose the
# instruction set by themselves, in another process or by the flags of a compiler, and those of packages, C++ programs, models of
# GPU kernels, several processes, documents, benchmarks and commands, which show nothing new here.
same_everywhere := cpp cli distributed test_packaging.py test_documents.py test_benchmarks.py test_examples.py test_gpu_check.py
test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: export TORCH_NHWC_CPU_CAPABILITY := avx2
test-avx2: export MKL_ENABLE_INSTRUCTIONS := AVX2
test-avx2: $(VENV)/has-test $(VENV)/built
	if grep -qw avx512f /proc/cpuinfo; then \
	  $(bin)/python -m pytest $(two) -m "not exhaustive and not levels" $(addprefix --ignore test/,$(same_everywhere)); fi

# The library is built here with warnings as errors.
lint: export TORCH_NHWC_WERROR := 1
lint: $(VENV)/has-lint $(VENV)/built
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
	$(bin)/python setup.py --quiet build_ext --build-lib build/lint

# Generated cases at scale, with a crash as a result: two hours in full on an idle core. FUZZ="--scale 0.01" runs fewer,
# FUZZ="--networks 100 --seed 3" those of one part; tools/fuzz says what the parts are. For a new version of torch,
# FUZZ="--convolutions 5000" counts what PyTorch computes wrong, with `--isa AVX2` as on a CPU without AVX-512.
fuzz: $(VENV)/built
	$(bin)/python tools/fuzz $(FUZZ)

# What the documents take from the code and from the benchmarks' results.
docs: $(VENV)/has-test $(VENV)/built
	$(bin)/python tools/write_documents.py
	$(bin)/python benchmarks/report.py

# The documents as a site, in site/; with a server, while they are written.
site: $(VENV)/has-docs
	$(bin)/python -m mkdocs build --strict

site-serve: $(VENV)/has-docs
	$(bin)/python -m mkdocs serve

# Two hours and 12 GB of memory; nothing else may run on the machine.
bench: $(VENV)/has-test $(VENV)/built
	$(bin)/python benchmarks/bench_weights.py
	$(bin)/python benchmarks/bench_weights.py --large
	$(bin)/python benchmarks/bench_models.py
	$(bin)/python benchmarks/bench_overhead.py
	$(bin)/python benchmarks/bench_convolutions.py
	$(bin)/python benchmarks/bench_errors.py
	$(bin)/python benchmarks/bench_positions.py
	$(bin)/python benchmarks/bench_collate.py
	$(bin)/python benchmarks/bench_kept.py
	$(bin)/python benchmarks/bench_layers.py
	$(bin)/python benchmarks/bench_layouts.py
	$(bin)/python benchmarks/bench_layouts.py --one-image
	$(bin)/python benchmarks/bench_memory.py
	$(bin)/python benchmarks/bench_tune.py
	$(bin)/python benchmarks/report.py

# The other ways to run a model, in an environment that has OpenVINO and ONNX Runtime next to what is here: two hours.
bench-peers: export PYTHONPATH := $(CURDIR)
bench-peers: $(VENV)/peers/has-peers
	$(VENV)/peers/bin/python benchmarks/bench_peers.py
	$(VENV)/peers/bin/python benchmarks/bench_peers.py --one-image
	$(VENV)/peers/bin/python benchmarks/profile_peers.py
	$(bin)/python benchmarks/report.py

# A wheel for the torch of the environment, and the sources, in dist/. Libraries that torch brings are not copied into the
# wheel: a second one in a process would have threads and tensors of its own.
wheel: $(VENV)/has-wheel
	rm -rf build/wheel build/lib*
	TORCH_NHWC_LABEL=1 $(bin)/python -m build --no-isolation --wheel --outdir build/wheel
	$(bin)/python -m auditwheel repair build/wheel/*.whl --wheel-dir dist \
	  --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libgomp.so.*' --exclude 'libcudart.so.*'
	$(bin)/python -m build --no-isolation --sdist

# Those of all supported versions, one after the other in one folder, and their checksums.
wheels:
	for version in $(MATRIX); do \
	  rm -rf .matrix && $(MAKE) wheel VENV=.matrix TORCH=$$version || exit 1; \
	done
	rm -rf .matrix dist/torch-nhwc-*.tar.gz  # the name of the sdist by an older setuptools
	cd dist && sha256sum *.whl *.tar.gz > SHA256SUMS

# Tests with all supported versions, likewise: of every behaviour where pip finds a CPU build of torch, and otherwise of
# the operators on the CPU. With the last version, the newest, also of the real programs in docs/frameworks.md, whose
# packages are installed for it. Writes the table of docs/limits.md.
matrix:
	status=0; \
	for version in $(MATRIX); do rm -rf .matrix; $(MAKE) matrix-$$version || status=1; done; \
	rm -rf .matrix; exit $$status

matrix-%: export TORCH_NHWC_CUDA ?= 0
matrix-%:
	$(MAKE) .matrix/has-test .matrix/built VENV=.matrix TORCH=$*
	.matrix/bin/python tools/matrix.py $(if $(filter $*,$(lastword $(MATRIX))),--programs)

# SSE2 on an old CPU and NEON on 64-bit Arm, under qemu; fails where qemu-user or the cross compiler are missing.
test-emulated: $(VENV)/built
	TORCH_NHWC_REQUIRE_QEMU=1 $(bin)/python -m pytest -m emulated

# Everything that needs a GPU, and nothing else; fails where there is none. Like the next two, it does without packages
# that cannot be had, as on a machine without a network; tests and models that need them are left out.
test-cuda: $(VENV)/built
	TORCH_NHWC_REQUIRE_GPU=1 $(bin)/python -m pytest --numprocesses 4 -m cuda

# What only a GPU can answer, in order of worth and in ten minutes; tools/gpu_check.py says how to go on with the rest.
gpu-check: $(VENV)/built
	$(bin)/python tools/gpu_check.py $(GPU_CHECK)

# Nothing else may run on the GPU.
bench-cuda: $(VENV)/built
	$(bin)/python benchmarks/bench_weights.py --device cuda
	$(bin)/python benchmarks/bench_models.py --device cuda
	$(bin)/python benchmarks/bench_layers.py --device cuda
	$(bin)/python benchmarks/bench_layers.py --device cuda --operators
	$(bin)/python benchmarks/bench_layouts.py --device cuda
	$(bin)/python benchmarks/report.py

# Every kernel under the tools of compute-sanitizer, which comes with the CUDA toolkit; fails where it is missing.
sanitize-cuda: $(VENV)/built
	$(if $(SANITIZER),,$(error compute-sanitizer is missing: install the CUDA toolkit, or name it by SANITIZER=))
	for tool in memcheck racecheck initcheck synccheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $$tool --error-exitcode 1 \
	    $(bin)/python test/ops/sanitized.py || exit 1; \
	done

clean:
	rm -rf $(VENV) .matrix build dist site *.egg-info torch_nhwc/libtorch_nhwc*.so torch_nhwc/build_info.json

$(VENV)/installed: pyproject.toml tools/make_environment.py tools/requirements.py
	$(PYTHON) tools/make_environment.py $(VENV) $(TORCH:%=--torch %)
	touch $@

# An extra, all of it; for $(VENV)/installed what could be had will do.
$(VENV)/has-%: $(VENV)/installed
	$(bin)/python tools/requirements.py $*
	touch $@

$(VENV)/peers/has-peers: $(VENV)/has-test $(VENV)/built
	$(bin)/python tools/make_environment.py $(VENV)/peers
	$(VENV)/peers/bin/python tools/requirements.py peers
	touch $@

# Again where another environment has built the library meanwhile, for its torch.
$(VENV)/built: $(VENV)/installed $(sources) $(wildcard torch_nhwc/build_info.json)
	$(bin)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@
