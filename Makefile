# make demo: set up and show a heatmap. make test: set up and check. make test-transformers: what is
# about transformers' own code, on both of its releases. make test-kernels: the kernels of GPUs, interpreted. make docs: run the
# notebooks, build the site. make mutants: how many mistakes the tests notice. Python 3.10 or newer.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTHONS ?= $(PYTHON)
EXAMPLES ?= 2000
PARTS ?= 10
SAMPLE ?= 200
SEED ?= 0
TEXT ?= A gripping, beautifully acted film, though the ending feels a little rushed.

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Bytecode is kept even where the environment forbids it: every process would compile what it imports, and every test
# worker rewrite the asserts of all tests.
export PYTHONDONTWRITEBYTECODE =
# One thread a test worker: more of them fight for the cores.
THREADS = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Each file goes to one worker, which makes what its tests share once; conftest.py has the longest begin first.
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# What is about transformers' own code, models, tokenizers and saved files: every architecture's contract, in which each
# method explains and each edit writes, the shipped models, training.
ON_BOTH = tests/contracts tests/architectures tests/evaluation tests/training tests/test_training.py tests/test_demos.py \
    tests/test_intercept.py tests/probes/test_evaluate.py \
    $(addprefix tests/data/test_,byte_pairs.py language.py tokenizer.py)
# What is run on release 5 too, and what of it is not: our own equations, models, options and files.
ON_5 = tests/contracts tests/architectures $(addprefix tests/test_,intercept.py model.py) \
    $(addprefix tests/test_demos.py::test_,the_fingerprint_is_the_same_under_every_version_of_transformers \
    plain_sentences_are_answered) \
    $(addprefix tests/test_package.py::test_,transformers_knows_our_models importing_transformers_does_not_import_our_models) \
    $(addprefix tests/data/test_,byte_pairs.py language.py tokenizer.py)
NOT_TRIED_ON_5 = $(addprefix --ignore tests/architectures/test_,attention_options.py baleen_options.py concrete.py \
    config_values.py damaged.py default_sizes.py diff_checkpoints.py diff_mamba.py diff_mamba_pair.py fla.py \
    fla_fields.py fla_rwkv7.py gfssm.py groupmamba.py hub_checkpoints.py linear_attention.py mamba2attn.py \
    mamba3.py mamba_ssm.py mambavision.py own.py own_parts.py packed.py packed_damage.py selective.py vim.py weight_files.py) \
    $(addprefix --ignore tests/contracts/test_,compiled.py recorded_step.py survival.py) \
    $(addprefix --deselect tests/test_intercept.py::test_,threads_trace_one_model_as_one_does \
    each_thread_has_its_own_edits) \
    $(addprefix --deselect tests/architectures/test_,adapter_folders.py::test_lora_in_all_its_forms \
    adapter_folders.py::test_other_kinds_of_adapters adapter_folders.py::test_what_an_adapters_configuration_may_not_say \
    adapters.py::test_probes_are_those_of_the_merged_model adapters.py::test_the_bound_is_that_of_the_merged_model \
    heads.py::test_measures_of_classes_are_refused folders.py::test_weights_that_were_saved_within_a_wrapper hybrids.py::test_a_family_is_imported_with_its_first_model)
# Compared with in tests. What it pins cannot be installed beside today's packages, and what is compared needs none of it.
PROMPTBENCH = promptbench==0.0.4 autocorrect==2.6.1
# Layers and a model of others, in a folder of their own: transformers imports xlstm where it is installed, and then fails.
FOREIGN = mambapy==1.2.0 minGRU-pytorch==0.2.1 xlstm==2.0.6 typeseg==0.2.7 minimamba==1.0.1 LRU-pytorch==0.1.3 s5-pytorch==0.2.1 \
    rwkv7-hf==0.9.0
NOT_ON_5 = ^(transformers|tokenizers|huggingface-hub|numpy)==

# Kernels of Triton, compared with torch in triton's interpreter: on the release of triton that GPUs were measured with, whose
# interpreter wants an older numpy.
TRITON = triton==3.6.0 "numpy<2.4"
KERNELS = $(wildcard tests/backends/test_triton_*.py)

.PHONY: demo setup test lint types pytest fuzz test-kernels test-foreign test-transformers test-transformers4 test-transformers5 test-install test-beside-others test-perturbed test-exhaustive test-all notebooks docs mutants clean

demo: $(VENV)/.demo
	$(VENV)/bin/analyze heatmap demo/sst2-mamba2 --text "$(TEXT)" --out demo-output

setup: $(VENV)/.dev

# Side by side: the types are checked on one core, which the tests leave idle now and then.
test: $(VENV)/.dev
	$(MAKE) --no-print-directory -j 3 lint types pytest

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .

types: $(VENV)/.dev
	$(VENV)/bin/mypy

# Without what test-transformers4 runs and pages in a browser; with APART= it runs these too, in the same processes.
pytest: APART ?= $(ON_BOTH) $(addprefix tests/reports/test_,browser.py serve_browser.py)
pytest: $(VENV)/.dev
	$(THREADS) SSMSCOPE_SMALL_PIECES=1 $(VENV)/bin/pytest -q $(SPREAD) $(addprefix --ignore ,$(APART) tests/test_notebooks.py)

# Command lines of every verb that nobody would type, EXAMPLES of each in PARTS tests; with VERB=heatmap of that one.
fuzz: $(VENV)/.dev
	$(THREADS) SSMSCOPE_FUZZ=$(EXAMPLES) SSMSCOPE_FUZZ_PARTS=$(PARTS) $(VENV)/bin/pytest -q -rA -n $(WORKERS) --dist worksteal tests/fuzz $(if $(VERB),-k "$(VERB)")

test-kernels: $(VENV)-transformers5/.dev
	$(THREADS) TRITON_INTERPRET=1 $(VENV)-transformers5/bin/pytest -q -n $(WORKERS) --dist worksteal $(KERNELS)

# Networks of packages that transformers knows nothing of.
test-foreign: $(VENV)/.foreign
	$(THREADS) PYTHONPATH=$(VENV)/foreign $(VENV)/bin/pytest -q tests/test_package_layers.py tests/test_usual_layers.py \
	    tests/test_own_matrix.py tests/test_typeseg.py
	$(THREADS) PYTHONPATH=$(VENV)/foreign $(VENV)/bin/pytest -q tests/test_notebooks.py -k a-published-model

$(VENV)/.foreign: Makefile $(VENV)/.dev
	$(PYTHON) tools/install.py $(VENV) --quiet --no-deps --target $(VENV)/foreign $(FOREIGN)
	touch $@

# What orders, ranks and records, with noise larger than rounding on every forward pass and gradient.
test-perturbed: $(VENV)/.dev
	$(THREADS) SSMSCOPE_PERTURB=$(SEED) $(VENV)/bin/pytest -q $(SPREAD) $(addprefix tests/,test_recorded.py test_ties.py views)

# Which share of plausible one-line mistakes the tests notice: a seeded sample of SAMPLE of each area. Under two hours on
# two cores; with AREAS=measures of that one.
mutants: $(VENV)/.dev
	$(THREADS) $(VENV)/bin/python tools/mutants.py $(AREAS) --sample $(SAMPLE) --seeds $(SEED) --workers $(WORKERS)

# What has to do with transformers' own code, on the release that .venv has, a 4, and once more all of it on the newest 5.
test-transformers: test-transformers4 test-transformers5

# In the contracts of this run whatever is computed in pieces is cut into small ones.
test-transformers4: $(VENV)/.dev
	$(THREADS) SSMSCOPE_SMALL_PIECES=1 $(VENV)/bin/pytest -q $(SPREAD) $(ON_BOTH)

test-transformers5: $(VENV)-transformers5/.dev
	$(VENV)-transformers5/bin/python -c "import transformers; print('transformers', transformers.__version__)"
	$(THREADS) SSMSCOPE_EXHAUSTIVE=$${SSMSCOPE_EXHAUSTIVE:-contracts} $(VENV)-transformers5/bin/pytest -q $(SPREAD) $(ON_5) $(NOT_TRIED_ON_5)

# The wheel and the source distribution, installed into an empty environment of each of PYTHONS.
test-install: $(VENV)/.dev
	SSMSCOPE_INSTALL="$(PYTHONS)" $(VENV)/bin/pytest -q tests/test_install.py

# The guide for people who come from other libraries, in environments of these; they cannot all be installed together. One
# has mamba_ssm too, without its kernels: its own models, run by its references in torch.
test-beside-others: $(VENV)-beside/.dev $(VENV)-inseq/.dev
	for place in $(VENV)-beside $(VENV)-inseq; do $(THREADS) $$place/bin/pytest -q tests/test_beside_others.py || exit 1; done
	$(THREADS) $(VENV)-beside/bin/pytest -q tests/architectures/test_mamba_ssm.py

# All that .ci/run may leave out: to be run before a release.
test-all:
	$(MAKE) --no-print-directory test APART=
	$(MAKE) --no-print-directory test-transformers5
	$(MAKE) --no-print-directory -j 4 --output-sync=target docs test-install test-kernels test-foreign

# All with every model, pair of options and value, where they try some that stand for them: it takes an hour.
test-exhaustive: export SSMSCOPE_EXHAUSTIVE = all
test-exhaustive:
	$(MAKE) --no-print-directory test
	$(MAKE) --no-print-directory test-transformers

# The notebooks, run again with what they show kept in them, small.
notebooks: $(VENV)/.foreign
	$(THREADS) PYTHONPATH=$(VENV)/foreign $(VENV)/bin/python tools/run_notebooks.py

# The documentation's site, into build/site, with what the notebooks give when their test runs them.
docs: $(VENV)/.dev
	$(THREADS) $(VENV)/bin/pytest -q -n $(WORKERS) tests/test_notebooks.py
	$(THREADS) $(VENV)/bin/mkdocs build --strict

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PYTHON) tools/install.py $(VENV) --quiet -c constraints.txt -e ".[dev,attacks,ray]"
	$(PYTHON) tools/install.py $(VENV) --quiet --no-deps $(PROMPTBENCH)
	touch $@ $(VENV)/.demo

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PYTHON) tools/install.py $(VENV) --quiet -c constraints.txt -e .
	touch $@

$(VENV)-transformers5/.dev: pyproject.toml constraints.txt | $(VENV)-transformers5/bin/python
	grep -vE '$(NOT_ON_5)' constraints.txt > $(VENV)-transformers5/constraints.txt
	$(PYTHON) tools/install.py $(VENV)-transformers5 --quiet --upgrade -c $(VENV)-transformers5/constraints.txt -e ".[dev,lm-eval]" "transformers>=5,<6" $(TRITON)
	touch $@

$(VENV)-beside/.dev: OTHERS = transformer-lens==4.3.0 nnsight==0.8.1
$(VENV)-inseq/.dev: OTHERS = inseq==0.7.1
$(VENV)-beside/.dev: MAMBA_SSM = mamba-ssm==2.3.2.post1
$(VENV)-beside/.dev $(VENV)-inseq/.dev: %/.dev: pyproject.toml | %/bin/python
	$(PYTHON) tools/install.py $* --quiet -e . $(OTHERS) "torch<2.14" "transformers>=5,<6" beartype hypothesis pytest setuptools wheel
	$(if $(MAMBA_SSM),MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(PYTHON) tools/install.py $* --quiet --no-deps --no-build-isolation $(MAMBA_SSM))
	touch $@

%/bin/python:
	$(PYTHON) -c "import sys; sys.version_info >= (3, 10) or sys.exit('ssmscope needs Python 3.10 or newer, this is ' + sys.version + '; try: make PYTHON=python3.12')"
	$(PYTHON) -m venv $* || { rm -rf $*; echo "python's venv module is missing; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

clean:
	rm -rf $(VENV) $(VENV)-transformers5 $(VENV)-beside $(VENV)-inseq demo-output build dist .mypy_cache .pytest_cache .ruff_cache
