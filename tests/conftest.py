"""Settings every test runs under."""

import collections
import gc
import itertools
import os
import threading
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

# Before JAX is imported: what shards a batch needs several devices to be seen. Programs are
# compiled by the thousand and run once or twice each, so machine code need not be the best;
# the emitters of fused loops take longer than the rest of the compiler. JAX 0.12 has no others.
# With BATCHAX_TEST_FLAGS=default, programs are compiled as users compile them.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",
        *(
            [
                "--xla_backend_optimization_level=0",
                "--xla_cpu_parallel_codegen_split_count=1",
                *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib") < "0.11" else []),
            ]
            if os.environ.get("BATCHAX_TEST_FLAGS") != "default"
            else []
        ),
    ]
)
# A call of LAPACK keeps a thread of the pool that all devices share until others are free. With a
# thread for each of two cores, four devices may wait for each other forever (guides/devices.md).
os.environ.setdefault("PJRT_NPROC", "16")
# Most programs are the same in the next run, and many in a run with other options.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "compiled")
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest
from hypothesis import HealthCheck, settings
from jax import lax
from jax._src.interpreters import mlir

from batchax.rows import size_classes, specialize

from support import slow_tests

settings.register_profile(
    "batchax",
    deadline=None,  # the first example of a shape compiles
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("batchax")
jax.config.update("jax_platforms", "cpu")
# Staging makes millions of objects that live long; looking for cycles among them takes a tenth
# of the time.
gc.set_threshold(100_000, 20, 20)


# What is compared is one program; there are a few calls outside of `jit`. A test that needs more
# than so many is marked. Tests at night compile what they need: limits are for what each commit
# and `make test-all` run. Which test compiles what several share depends on which of them comes
# first in a process, so a few more are allowed than it should need.
MOST_COMPILATIONS, SHARED = 25, 25
_compiled = itertools.count()


def _heard(event, *_, **__):
    if event == "/jax/core/compile/backend_compile_duration":
        next(_compiled)


jax.monitoring.register_event_duration_secs_listener(_heard)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before, begun = next(_compiled), slow_tests.spent()
    result = yield
    item.user_properties.append(("CPU time", slow_tests.spent() - begun))
    compiled = next(_compiled) - before - 1
    marker = item.get_closest_marker("compiles")
    most = marker.args[0] if marker else MOST_COMPILATIONS
    # Where tests are left out, any may be the first of those that share programs.
    shared = 4 * SHARED if item.config.getoption("commit") else SHARED
    if compiled > most + shared and _whole_files(item.config, item.session.items):
        pytest.fail(f"{compiled} compilations, more than {most}: see Tests in CONTRIBUTING.md")
    return result


def _whole_files(config, items):
    few = config.getoption("every") > 1 or len(items) < 100
    return not few and not config.getoption("compile_all") and not config.getoption("nightly")


def pytest_addoption(parser):
    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="run one test of N, the same each time"
    )
    parser.addoption(
        "--part",
        default="1/1",
        metavar="K,../N",
        help="run these of N parts of the tests: 2,3/3 is what 1/3 leaves out",
    )
    parser.addoption(
        "--of",
        default="tests",
        metavar="DIRS",
        help="where --every and --part leave tests out; run all others",
    )
    parser.addoption(
        "--commit",
        action="store_true",
        help="of slow tests (slow.txt), run one in six, the same each time",
    )
    parser.addoption(
        "--write-slow", action="store_true", help="make slow.txt again, for the tests that run"
    )
    parser.addoption(
        "--compile-all",
        action="store_true",
        help="compile what results are compared with, too, and compare what NumPy makes of it",
    )
    parser.addoption(
        "--nightly", action="store_true", help="run tests that take long, and no others"
    )


def pytest_configure(config):
    from support import oracle

    oracle.COMPILED = config.getoption("compile_all")
    if config.getoption("write_slow") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(slow_tests.Measured())


def pytest_collection_modifyitems(config, items):
    at_night = _at_night(items)
    items[:] = [item for item in items if (item in at_night) == config.getoption("nightly")]
    if config.getoption("commit"):
        left = slow_tests.left_to_whole_runs(items)
        items[:] = [item for item in items if item not in left]
    share, divided = config.getoption("every"), tuple(config.getoption("of").split())
    mine, parts = config.getoption("part").split("/")
    mine, parts = {int(k) - 1 for k in mine.split(",")}, int(parts)
    place = _places(items)

    def runs(item):
        if not item.nodeid.startswith(divided):
            return True
        if place[item] % parts not in mine and item.get_closest_marker("in_every_part") is None:
            return False
        whole = item.get_closest_marker("only_in_whole_runs") is not None
        return share == 1 or (not whole and _number(item) % share == 0)

    items[:] = filter(runs, items)


def _number(item):
    return slow_tests.number(item.nodeid)


def _places(items):
    """Of each among the tests of its file, by chance: each file has its share of each part."""
    files = collections.defaultdict(list)
    for item in sorted(items, key=_number):
        files[item.path].append(item)
    return {item: place for tests in files.values() for place, item in enumerate(tests)}


def _at_night(items):
    night = {item for item in items if item.get_closest_marker("nightly")}
    families = collections.defaultdict(list)
    for item in items:
        if item not in night:
            families[item.nodeid.split("[")[0]].append(item)
    for cases in families.values():
        if marker := cases[0].get_closest_marker("each_commit"):
            night.update(set(cases) - set(_covering(cases, *marker.args)))
    return night


def _covering(cases, count, *first):
    """So many of these, among them each value of each parameter, if so many can have them.

    first: ids of cases that are of them in any case.
    """
    values = {
        case: [(name, id(value)) for name, value in case.callspec.params.items()] for case in cases
    }
    chosen, left, seen = [], sorted(cases, key=_number), collections.Counter()

    def new(case):
        fresh, often = sum(not seen[v] for v in values[case]), sum(seen[v] for v in values[case])
        return case.callspec.id in first, fresh, -often

    while left and len(chosen) < count:
        chosen.append(max(left, key=new))
        left.remove(chosen[-1])
        seen.update(values[chosen[-1]])
    return chosen


def pytest_collection_finish():
    gc.freeze()


if version("jaxlib") < "0.11":
    # These versions prepare a compiler's context for each program, which takes longer than
    # lowering a small one.
    _prepare, _prepared = mlir.make_ir_context, threading.local()

    def _context_of_this_thread():
        """One for a few hundred programs: what a context knows of a program, it keeps.

        A program that is lowered while another one is, to choose its chunks, has one of its own.
        """
        if _lowering():
            return _prepare()
        left, context = getattr(_prepared, "left_and_context", (0, None))
        if not left:
            left, context = 300, _prepare()
        _prepared.left_and_context = left - 1, context
        return context

    def _lowering():
        try:
            return mlir.ir.Context.current is not None
        except ValueError:
            return False

    mlir.make_ir_context = _context_of_this_thread


def _put(x):
    """`x` as an array of JAX, which makes one of NumPy's by a program for each shape.

    So inputs of tests, and what results are compared with, were two programs of three.
    """
    return x if isinstance(x, jax.Array) else jax.device_put(x)


lax.stage_p.def_impl(_put)


def pytest_sessionstart(session):
    """What was not used for a week is compiled again, should it be needed."""
    compiled = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if hasattr(session.config, "workerinput") or not compiled.exists():
        return
    for entry in compiled.iterdir():
        with suppress(FileNotFoundError):  # another session may do the same
            if entry.stat().st_atime < time.time() - 7 * 24 * 3600:
                entry.unlink()


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_fit_memory():
    """Files share what they compiled, until it is too much for a small machine."""
    yield
    if _much_is_held():
        jax.clear_caches()


@pytest.fixture
def own_registrations(monkeypatch):
    """What an example registers is gone after it."""
    from batchax.frontend import containers
    from batchax.kernel import registry

    monkeypatch.setattr(registry, "_rules", registry._rules.copy())
    before = set(containers._containers)
    yield
    for added in set(containers._containers) - before:  # JAX knows of them, too
        containers.unregister_container(added)


@pytest.fixture
def free_groups(monkeypatch):
    """Groups of rows cost nothing to compile, so that there are three, if any gain anything."""
    monkeypatch.setattr(size_classes, "RUNS_OF_ROWS", float("inf"))
    monkeypatch.setattr(size_classes, "_MOST_GROUPS", 3)


@pytest.fixture
def longer_rows(monkeypatch):
    """As if rows might be too long for a program for each length, and of too many kinds."""
    monkeypatch.setattr(specialize, "MOST_LENGTHS", 1)
    monkeypatch.setattr(specialize, "MOST_PARTS", 1)


@pytest.fixture
def unfiltered_tracebacks():
    """Tracebacks with all of their frames, and without a note that some are hidden."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


def _much_is_held():
    """Whether this process is near 3 GiB, or half the mappings Linux allows a process.

    Compiled programs take several mappings each, of 65,530.
    """
    own = Path("/proc/self")
    if not own.exists():
        return True
    pages = int((own / "statm").read_text().split()[1])
    mappings = (own / "maps").read_text().count("\n")
    return pages * os.sysconf("SC_PAGE_SIZE") > 3 * 2**30 or mappings > 30_000


@pytest.fixture
def next_derivatives():
    """The implementations that JAX will use for custom derivatives and ``jax.checkpoint``."""
    options = ["jax_custom_vjp3", "jax_remat3", "jax_custom_jvp3"]
    before = {name: getattr(jax.config, name) for name in options if hasattr(jax.config, name)}
    try:
        for name in before:
            jax.config.update(name, True)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
