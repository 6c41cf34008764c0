"""Runs test suites of other libraries with `bx.vmap` in place of `jax.vmap`.

`python -m suites equinox` makes an environment for the suite, runs it with `jax.vmap` and then with
`bx.vmap`, and prints each test with another outcome. Arguments after `--` go to pytest. It fails
if a difference is not in `differences.toml`, which names a reason for each.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zlib
from pathlib import Path
from typing import NamedTuple

import jax

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CACHE = ROOT / ".cache" / "suites"
SECONDS = 60  # that a test may take; with bx.vmap, three times that


class Suite(NamedTuple):
    """The tests of a library.

    Attributes:
      version: of the library, from the package index.
      tests: files or folders with tests, relative to its source.
      needs: packages that the tests import.
      git: the repository that has them, or None if the source distribution does.
      tag: of the version, in that repository.
    """

    version: str
    tests: tuple[str, ...]
    needs: tuple[str, ...]
    git: str | None = None
    tag: str = "v{}"


SUITES = {
    "equinox": Suite(
        "0.13.8", ("tests",), ("beartype", "optax", "tqdm"),
        git="https://github.com/patrick-kidger/equinox",
    ),
    "lineax": Suite(
        "0.1.1", ("tests",), ("beartype",), git="https://github.com/patrick-kidger/lineax"
    ),
    "optimistix": Suite(
        "0.1.0", ("tests",), ("beartype", "diffrax", "optax", "pytest-benchmark", "sif2jax"),
        git="https://github.com/patrick-kidger/optimistix",
    ),
    "diffrax": Suite(
        "0.7.2", ("test",), ("beartype", "optax", "scipy", "tqdm"),
        git="https://github.com/patrick-kidger/diffrax",
    ),
    "blackjax": Suite("1.7.1", ("tests",), ("chex", "pytest-benchmark", "tqdm")),
    "numpyro": Suite(
        "0.21.0", ("test",), ("flax", "funsor", "optax", "pyyaml", "scipy"),
        git="https://github.com/pyro-ppl/numpyro", tag="{}",
    ),
    "dynamax": Suite("1.0.3", ("dynamax",), ()),
    "netket": Suite(
        "3.21.0", ("test",), ("networkx", "pytest-json-report", "pytest-xdist", "scipy"),
        git="https://github.com/netket/netket",
    ),
}  # fmt: skip


def prepare(name: str, suite: Suite) -> Path:
    """Returns the folder with `env`, the environment, and `source`, the tests; makes both once."""
    folder = CACHE / f"{name}-{suite.version}-jax-{jax.__version__}"
    if (folder / "ready").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python, uv = str(folder / "env/bin/python"), str(Path(sys.executable).with_name("uv"))
    packages = ["pytest", f"{name}=={suite.version}", f"jax=={jax.__version__}", *suite.needs]
    install = ["pip", "install", "--quiet"]  # by uv in a tenth of the time, where it can
    by_uv = [uv, *install, "--python", python, *packages]
    if not Path(uv).exists() or subprocess.run(by_uv).returncode:
        subprocess.run([python, "-m", *install, "--no-compile", *packages], check=True)
    source = folder / "source"
    if suite.git:
        clone = ["git", "clone", "--quiet", "--depth", "1", "--filter=blob:none", "--sparse"]
        clone += ["-c", "advice.detachedHead=false", "--branch", suite.tag.format(suite.version)]
        subprocess.run([*clone, suite.git, source], check=True)
        tests = ["git", "-C", source, "sparse-checkout", "set", *suite.tests]
        subprocess.run(tests, check=True)
    else:
        get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
        get += [":all:", "--dest", folder, f"{name}=={suite.version}"]
        subprocess.run(get, check=True)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
        (folder / archive.name.removesuffix(".tar.gz")).rename(source)
    if name not in suite.tests:  # what is installed is tested
        shutil.rmtree(source / name, ignore_errors=True)
    (folder / "ready").touch()
    return folder


def run(folder: Path, suite: Suite, vmap: str, arguments: list[str], every: int = 1) -> dict:
    """Runs the tests with one `jax.vmap`, and returns the outcome of each."""
    asked = zlib.crc32(repr((arguments, every, SECONDS)).encode())
    outcomes = folder / f"{vmap}-{asked:08x}.jsonl"
    begun = outcomes.with_suffix(".part")
    if vmap == "batchax" or not outcomes.exists():  # nothing changes that `jax.vmap` gives
        begun.unlink(missing_ok=True)
        begun.touch()
        paths = [str(ROOT / "src"), str(HERE)]
        settings = {
            "SUITE_VMAP": vmap,
            "SUITE_OUTCOMES": str(begun),
            "SUITE_SECONDS": str(SECONDS * (3 if vmap == "batchax" else 1)),
            "SUITE_EVERY": str(every),
            "PYTHONPATH": os.pathsep.join(paths),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(CACHE / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [folder / "env/bin/python", "-m", "pytest", "-p", "in_place_of_vmap", "-q"]
        command += ["-p", "no:cacheprovider", "--tb=short", "--rootdir=."]
        # The plugin writes down what its own process runs.
        command += ["-n0"] if "pytest-xdist" in suite.needs else []
        (folder / "pytest.ini").touch()  # a library without settings would get those of batchax
        named = [argument for argument in arguments if not argument.startswith("-")]
        command += arguments if named else [*suite.tests, *arguments]
        with outcomes.with_suffix(".log").open("w") as log:
            environment = {**os.environ, **settings}
            subprocess.run(command, cwd=folder / "source", env=environment, stdout=log, stderr=log)
        begun.rename(outcomes)
    return {line["test"]: line for line in map(json.loads, outcomes.read_text().splitlines())}


def compare(plain: dict, batched: dict, expected: dict[str, str]) -> tuple[list, list]:
    """Lines for differences, and the tests among them that are not expected."""
    lines, unexpected = [], []
    missing = {"outcome": "did not run", "message": ""}
    for test in sorted({*plain, *batched}):
        before, after = plain.get(test, missing), batched.get(test, missing)
        if before["outcome"] == after["outcome"]:
            continue
        reason = next(
            (r for p, r in expected.items() if p == test or fnmatch.fnmatchcase(test, p)), None
        )
        if reason is None:
            unexpected.append(test)
        told = (after["message"] or before["message"]).strip()[:300]
        lines += [f"{test}: {before['outcome']} -> {after['outcome']}", f"    {reason or told}"]
    return lines, unexpected


def main() -> None:
    own, _, arguments = " ".join([*sys.argv[1:], ""]).partition("-- ")
    parser = argparse.ArgumentParser(prog="suites", description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help="all if none is named")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run one test of N")
    options = parser.parse_args(own.split())
    expected = tomllib.loads((HERE / "differences.toml").read_text())
    new = []
    for name in options.libraries or SUITES:
        suite = SUITES[name]
        folder = prepare(name, suite)
        asked = arguments.split(), options.every
        plain, batched = (run(folder, suite, vmap, *asked) for vmap in ("jax", "batchax"))
        lines, unexpected = compare(plain, batched, expected.get(name, {}))
        using = sum(outcome["calls"] > 0 for outcome in plain.values())
        print(f"{name} {suite.version}: {len(plain)} tests, of which {using} call vmap,", end=" ")
        print(f"{len(lines) // 2} differ, {len(unexpected)} not as expected", *lines, sep="\n")
        new += unexpected or ([] if plain else [name])
    sys.exit(f"{len(new)} tests differ, for no reason in differences.toml" if new else 0)


if __name__ == "__main__":
    main()
