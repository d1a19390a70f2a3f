# Every target makes .venv itself: Python >= 3.12 is found (or made with uv), dependencies installed.
#
#   make quickstart   build ragged-dot-tpu, load it with get_kernel, run a Qwen3-MoE on it
#   make test         lint and every test that CI runs        make test-all   heavy sweeps too
#   make bench        on a TPU VM: microbenchmarks; ARGS="R1" or "rms_norm --rows 8192 --d 4096 --chip v6e": static
#   make report       docs/report/ and the tables of README.md from bench/results/
#   make bench-refresh  estimates every case again (what changed), then the report
#   make build        build the Hub variants into build/      make format     ruff, in place
#   make publish      what ARGS="--org ORG" would upload; ARGS="--org ORG --execute" uploads it
#
# On a TPU VM take the CPU build of torch: make quickstart PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

VENV ?= .venv
PIP_ARGS ?=
ARGS ?=
RUN = TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(VENV)/bin/python
PYTEST = -m pytest -n 2 --dist loadgroup
STAMP = $(VENV)/.installed

.PHONY: quickstart test test-all bench report bench-refresh build publish format lint clean

quickstart: $(STAMP)
	$(VENV)/bin/python scripts/quickstart.py

test: $(STAMP) lint
	$(RUN) $(PYTEST) -m "not slow"

test-all: $(STAMP) lint
	$(RUN) $(PYTEST)

bench: $(STAMP)
ifeq ($(strip $(ARGS)),)
	$(VENV)/bin/python -W ignore -m bench.device
else
	$(RUN) -W ignore -m bench.static $(ARGS)
endif

report: $(STAMP)
	$(RUN) -W ignore -m bench.report

bench-refresh: $(STAMP)
	$(RUN) -W ignore -m bench.static --refresh
	$(RUN) -W ignore -m bench.gate --refresh
	$(RUN) -W ignore -m bench.report

build: $(STAMP)
	$(RUN) scripts/build.py

publish: build
	$(RUN) scripts/publish.py $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf build $(VENV)

$(STAMP): pyproject.toml scripts/make_venv.sh
	sh scripts/make_venv.sh $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install $(PIP_ARGS) ".[test]"
	touch $@
