# Thin on purpose: every target is one or two real commands. `make` alone prints them.

# The paper's study and its smaller sister are for GPUs. Each list of pins has an environment of its own.
PINS ?= envs/$(if $(filter figure1 afternoon night gpu paper,$(MAKECMDGOALS)),gpu,cpu).txt
VENV ?= .venv$(subst -cpu,,-$(basename $(notdir $(PINS))))
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# More arguments for the command behind a target: make reproduce ARGS="--configfile studies/tiny.yaml"
ARGS ?=
# Of all kinds together. A million take two cores an hour, or two beside other work.
FUZZ_CASES ?= 1000000
# Of the machine, for the study at the paper's scale.
GPUS ?= 8
MEMORY ?= 80GB
# Where PyTorch's CPU build comes from if no index that pip is configured with has it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Where this is set, each process would compile vLLM again: 16 s.
unexport PYTHONDONTWRITEBYTECODE

# Snakemake, vLLM and others keep caches there; with a plain traceback where they cannot.
ifneq ($(shell d="$${XDG_CACHE_HOME:-$$HOME/.cache}"; mkdir -p "$$d" 2>/dev/null && test -w "$$d" && echo yes),yes)
export XDG_CACHE_HOME := $(CURDIR)/.snakemake/cache
endif

STAMP := $(VENV)/.installed
IN_VENV := @. $(VENV)/bin/activate && set -x &&
# What a target needs besides the study.
ADD = $(VENV)/bin/python envs/install.py

# Each build would print that the theme has a successor. Zensical 0.1.2 has no code that calls its `hooks`.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1

STUDIES := $(patsubst studies/%.yaml,%,$(sort $(wildcard studies/*.yaml) $(wildcard studies/search/*.yaml)))
# Pages of the default study, and over all studies.
PAGES := gradients distributions overview

.PHONY: $(STUDIES) $(PAGES) figure1 help venv install reproduce test test-slow test-long slurm peers verl verl-study trl chaos planted fuzz bench bench-quick soak families diagnose-exam explain-exam explain-cases optimum gpu-check lint publish pages rulegraph house docs docs-serve docs-check format clean
.DEFAULT_GOAL := help

help:  ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  %-13s %s\n", $$1, $$2}'
	@echo "  or a study of studies/: $(STUDIES)"
	@echo "  or a page: figure1 $(PAGES)"

reproduce: venv  ## compute the study, or go on with it: tables, figures, page
	$(IN_VENV) snakemake --cores all $(ARGS)

# A test of two threads beside another worker: a thread that waits leaves its core to the others, or a minute takes ten.
TESTED = tests/e2e tests/workflow tests/docs tests/unit tests/gpu
TWO_WORKERS = $(IN_VENV) OMP_WAIT_POLICY=passive pytest -n 2 --dist loadfile --no-loadscope-reorder

# A study with its ablations.
$(STUDIES): venv
	$(IN_VENV) snakemake --cores all all ablations --configfile studies/$@.yaml $(ARGS)

$(PAGES): venv
	$(IN_VENV) snakemake --cores all $@ $(ARGS)

# The paper's Figure 1, from its study: what it will take, then all of it.
figure1: venv
	$(IN_VENV) tailrl plan studies/paper.yaml --gpus $(GPUS) --memory $(MEMORY) && \
		snakemake --cores all figure1 --configfile studies/paper.yaml --set-resources train:ranks=$(GPUS) evaluate:ranks=$(GPUS) $(ARGS)

# A process on each core, which take file after file; the tiny study and the workflow's tests, the longest, go first. Both
# are slow ones.
test: venv  ## the tests but the slow ones: five minutes
	$(TWO_WORKERS) -m "not slow and not long" $(TESTED) $(ARGS)

test-slow: venv  ## a tiny whole study and other slow tests, of many cases two; the last line says what did not run: twenty minutes
	$(TWO_WORKERS) -m "slow and not long" $(TESTED) $(ARGS)

test-long: venv  ## every case of the slower tests, and those that take many minutes: an hour
	$(TWO_WORKERS) -m long $(TESTED) $(ARGS)

slurm: venv  ## a tiny study on a real Slurm, whose jobs, daemons and nodes are killed: ten minutes
	$(ADD) envs/slurm.txt
	$(IN_VENV) pytest -m slow -s tests/slurm $(ARGS)

# PEERS=FOLDER: with checkouts of the frameworks of benchmarks/peers.yaml that are on no index.
peers: venv  ## the frameworks' own losses, configurations and metrics beside ours, downloaded by version: half an hour
	$(IN_VENV) export OMP_NUM_THREADS=1 PEERS=$(PEERS) && python benchmarks/peer_presets.py $(ARGS) && \
		python benchmarks/framework_metrics.py --out docs/results/framework_metrics.csv

# An environment that has verl, and sees what VENV has: tailrl, pip and setuptools too.
verl: venv  ## the plugin for verl with verl's own engine, trainers, workers and queue, and its whole loop: twenty minutes
	$(VENV)/bin/python -m venv --without-pip $(VENV)-verl
	echo "import site; site.addsitedir('$(abspath $(VENV))/lib/python3.11/site-packages')" > $(VENV)-verl/lib/python3.11/site-packages/base.pth
	$(VENV)-verl/bin/python envs/install.py envs/verl.txt
	$(VENV)-verl/bin/python -m pytest -q tests/verl $(ARGS)

verl-study: venv  ## the same two arms by our own loop and by verl, in the environment of `make verl`
	$(VENV)-verl/bin/python tests/verl/two_trainers.py --out docs/results $(ARGS)

trl: venv  ## the tests of tailrl.trl with several versions of TRL: ten minutes
	$(ADD) envs/trl.txt
	$(IN_VENV) python benchmarks/trl_versions.py --out docs/results/trl_versions.csv $(ARGS)

chaos: venv  ## kill a small study 100 times; it must end as an undisturbed one: an hour, or 20 minutes with ARGS="--engine exact"
	$(IN_VENV) PYTHONPATH=tests/fixtures:docs/code python tests/chaos/chaos.py $(ARGS)

fuzz: venv  ## damaged inputs, FUZZ_CASES of them, each accepted or refused in one sentence: an hour or two
	$(IN_VENV) PYTHONPATH=tests/fixtures:tests/fuzz python tests/fuzz/fuzz.py --cases $(FUZZ_CASES) $(ARGS)

planted: venv  ## plant faults in a small study that is killed; each must be caught: half an hour
	$(IN_VENV) PYTHONPATH=tests/fixtures:docs/code python tests/chaos/planted.py --out docs/results/planted.csv $(ARGS)

bench: venv  ## time and memory beside other libraries; wants an idle machine for half an hour
	$(ADD) envs/bench.txt
	$(IN_VENV) export PYTHONPATH=workflow/scripts && python benchmarks/logprobs.py --out docs/results/logprobs.csv && \
		python benchmarks/logprobs.py --memory --out docs/results/logprobs_memory.csv && \
		OMP_NUM_THREADS=1 python benchmarks/update.py --out docs/results/update.csv && \
		OMP_NUM_THREADS=1 python benchmarks/remedies.py --out docs/results/remedies_cost.csv && \
		OMP_NUM_THREADS=1 python benchmarks/remedies.py --memory --out docs/results/centering_memory.csv && \
		OMP_NUM_THREADS=1 python benchmarks/step.py --out docs/results/step.csv && \
		python benchmarks/rollout.py --out docs/results/rollout.csv && \
		OMP_NUM_THREADS=1 python benchmarks/rollout_profile.py --out docs/results/rollout_profile.csv && \
		OMP_NUM_THREADS=1 python benchmarks/plan.py --out docs/results/plan.csv

# Log-probs and the plan are left to `bench`: their shortest rounds take minutes.
bench-quick: venv  ## the step beside TRL's and the engines, three rounds each, for a change under way: a few minutes
	$(ADD) envs/bench.txt
	$(IN_VENV) export OMP_NUM_THREADS=1 PYTHONPATH=workflow/scripts && python benchmarks/update.py --repeats 3 && \
		python benchmarks/step.py --repeats 3 && python benchmarks/rollout.py --policies "4 layers of 128" --threads 1 --repeats 3

soak: venv  ## train for 2,000 steps, and see whether the job keeps its size
	$(IN_VENV) OMP_NUM_THREADS=1 python benchmarks/soak.py --out docs/results/soak.csv $(ARGS)

# Without their dependencies: those of the environment serve.
families: venv  ## every family of models under vLLM, and written policies under older transformers: a quarter of an hour
	$(IN_VENV) pip install -q --no-deps --upgrade --target .older/transformers-4.51.3 transformers==4.51.3 tokenizers==0.21.4 huggingface-hub==0.36.0 && \
		pip install -q --no-deps --upgrade --target .older/transformers-4.57.6 transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.0 && \
		python benchmarks/model_families.py --out docs/results/families.csv --older .older/transformers-4.51.3 .older/transformers-4.57.6 $(ARGS)

diagnose-exam: venv  ## settle how sure `tailrl diagnose` is of a cause, and judge it on other models: under an hour
	$(ADD) envs/bench.txt
	$(IN_VENV) export OMP_NUM_THREADS=1 PYTHONPATH=benchmarks:workflow/scripts && python -m exams.diagnose settle && python -m exams.diagnose judge

explain-exam: venv  ## judge `tailrl explain` on faults planted in vLLM and transformers, on models it was not built with: an hour or two
	$(IN_VENV) export OMP_NUM_THREADS=1 PYTHONPATH=benchmarks && python -m exams.explain --out docs/results/explain_exam.csv $(ARGS)

optimum: venv  ## where exact gradient ascent of small models leads under a mismatch: ten minutes
	$(IN_VENV) python -m exams.optimum --out docs/results $(ARGS)

# CASES: a folder with logs of exams/explain/cases.yaml.
explain-cases: venv  ## explain a folder of logs, CASES=FOLDER, with SmolLM2-135M; says what each took: minutes a log
	$(ADD) envs/bench.txt
	test -e results/models/smollm2/config.json || $(VENV)/bin/python workflow/scripts/smollm2.py results/models/smollm2
	$(IN_VENV) PYTHONPATH=benchmarks python -m exams.explain.cases $(CASES) --model results/models/smollm2 --out docs/results/explain_cases.csv $(ARGS)

gpu-check: venv  ## what a GPU must show before a study: kernels, attention, exactness, steps, resuming, memory: about a quarter of an hour
	$(IN_VENV) PYTHONPATH=benchmarks python tests/gpu/gpu_check.py --out results/gpu_check.csv $(ARGS)

lint: venv  ## formats, style, types, imports, workflow
	$(IN_VENV) snakefmt --check Snakefile workflow/Snakefile workflow/rules && ruff check && ruff format --check && mypy && lint-imports && snakemake --lint

publish: venv  ## copy a study that has run into docs/results, and make anew what is made of it: STUDY=name
	$(IN_VENV) PYTHONPATH=docs/code python -m publish $(STUDY)
	$(MAKE) pages

# What a page of findings says comes from docs/results; tests compare.
pages: venv  ## write what is made of the docs: findings, figures, performance, lists and tables
	$(IN_VENV) export PYTHONPATH=docs/code && python -m findings.pages && python -m pages && \
		PYTHONPATH=docs/code:tests/fixtures python tests/chaos/chaos_tables.py

rulegraph: venv  ## the rules as a picture, docs/assets/rulegraph.svg; needs dot, of Graphviz
	$(IN_VENV) snakemake all ablations distributions gradients --rulegraph dot | \
		sed 's/bgcolor=white/bgcolor=transparent, rankdir=LR/; s/style="rounded"/style="rounded,filled", fillcolor=white/' | \
		dot -Tsvg > docs/assets/rulegraph.svg

house: venv  ## the rooms of the package as a picture, docs/assets/house.svg; needs dot and tred, of Graphviz
	$(IN_VENV) PYTHONPATH=docs/code python -m house | tred | dot -Tsvg > docs/assets/house.svg

docs: venv  ## build the documentation site into site/; a broken link, anchor or formula ends it
	$(ADD) envs/docs.txt
	$(IN_VENV) mkdocs build --strict $(ARGS)

docs-serve: venv  ## show the site on this machine while its pages are edited
	$(ADD) envs/docs.txt
	$(IN_VENV) mkdocs serve $(ARGS)

docs-check: docs  ## Lighthouse's accessibility audits of the site, by npm and a Chromium: half a minute a page
	cd docs/code/accessibility && npm ci --silent
	node docs/code/accessibility/check.mjs site $(ARGS)

format: venv  ## put the files into the format that lint wants
	$(IN_VENV) snakefmt Snakefile workflow/Snakefile workflow/rules && ruff check --fix && ruff format

venv: $(STAMP)  ## the pinned environment, in $VENV from $PINS

$(STAMP): $(PINS) pyproject.toml
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "Python 3.11 is needed, for the pins are for it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Installing $(PINS) into $(VENV): a minute or more, several GB"
	$(PYTHON) -m venv $(VENV)
	$(MAKE) --no-print-directory install PYTHON=$(VENV)/bin/python PINS=$(PINS)
	@touch $@

# What `venv` and the conda twins share: the pins and the package itself into the environment of $(PYTHON).
install:
	$(PYTHON) envs/install.py $(PINS) --torch-index $(TORCH_INDEX)

# results/ stays: it may hold days of training. So does $(VENV).
clean:  ## remove caches
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis site
	find workflow tests envs -name __pycache__ -prune -exec rm -rf {} +
