"""What contributors meet: workflows, hooks, forms and fragments call what there is."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from support import slow_tests

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FRAGMENTS = [path for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
TYPES = {
    each["directory"]
    for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
}


def read(path):
    return yaml.safe_load(path.read_text())


def jobs_as_run(workflow):
    """Each job of a workflow, once for each entry of its matrix, with that entry filled in."""
    for job in workflow["jobs"].values():
        matrix = dict(job.get("strategy", {}).get("matrix", {}))
        entries = matrix.pop("include", [{}])
        for values in itertools.product(*matrix.values()):
            for entry in entries:
                known = {**dict(zip(matrix, values, strict=True)), **entry}
                fill = lambda match, known=known: str(known.get(match[1], ""))
                text = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", fill, yaml.safe_dump(job, width=1000))
                yield yaml.safe_load(re.sub(r"\$\{\{.*?\}\}", "0", text))


def targets_in(command):
    """What a command asks make for."""
    for line in command.splitlines():
        for asked in re.findall(r"\bmake ([^&|;\n]*)", line):
            yield from (word for word in asked.split() if not re.search(r"^-|=", word))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_make_what_there_is(path):
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}  # a job that needs more says so
    made = set()
    for job in jobs_as_run(workflow):
        assert job["timeout-minutes"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.search(r"@v\d+$", step.get("uses", "@v1"))
            made |= set(targets_in(step.get("run", "")))
    assert made <= TARGETS, made - TARGETS
    assert made


def test_every_version_that_is_pinned_is_tested():
    tests = next(path for path in WORKFLOWS if path.stem == "tests")
    known = {f"3.{path.stem[3:]}" for path in (ROOT / "constraints").glob("py3*.txt")}
    (job,) = [job for job in read(tests)["jobs"].values() if "strategy" in job]
    assert {entry["python"] for entry in job["strategy"]["matrix"]["include"]} == known
    made = {word for each in jobs_as_run(read(tests)) for step in each["steps"]
            for word in targets_in(step.get("run", ""))}  # fmt: skip
    whole = re.search(r"^test: .*\n(?:\t.*\n)*", MAKEFILE, re.MULTILINE)[0]
    assert all(part in made for part in ("lint", "double", "single", "defaults"))
    assert all(part in whole for part in ("style", "types", "double", "single", "defaults"))


def test_the_hooks_are_those_of_make_lint():
    config = read(ROOT / ".pre-commit-config.yaml")
    (source,) = config["repos"]
    assert source["repo"] == "local"
    called = [target for hook in source["hooks"] for target in targets_in(hook["entry"])]
    (lint,) = re.findall(r"^lint: (.*)$", MAKEFILE, re.MULTILINE)
    assert called == lint.split()
    assert all(hook["language"] == "system" for hook in source["hooks"])


def test_pages_say_to_make_what_there_is():
    for page in ("CONTRIBUTING.md", "README.md", "docs/releases.md", "changes/README.md"):
        asked = re.findall(r"(?:^|`)make ([a-z][\w-]*)", (ROOT / page).read_text(), re.MULTILINE)
        assert asked, page
        assert set(asked) <= TARGETS, page


def test_fragments_are_well_formed():
    for path in FRAGMENTS:
        assert re.fullmatch(rf"(\d+|\+[\w-]+)\.({'|'.join(TYPES)})(\.\d+)?\.md", path.name)
        text = path.read_text()
        assert text.strip(), path.name
        assert text.endswith((".\n", ").\n")), path.name
        assert not re.search(r"^(#|- |\* )|\n\n", text, re.MULTILINE), f"{path.name}: two sentences"


def test_slow_tests_are_there():
    """A slow test whose name changes would run with each commit, and nobody would notice."""
    for file, names in itertools.groupby(
        sorted(slow_tests.listed()), lambda line: line.split("::")[0]
    ):
        text = (ROOT / "tests" / file).read_text()
        if "from support.store_tests import" in text:  # tests that all stores inherit
            text += (ROOT / "tests/support/store_tests.py").read_text()
        missing = [n for n in names if f"def {n.split('::')[-1]}(" not in text]
        assert not missing, f"make slow.txt again: pytest --write-slow {missing}"
