"""Prose: no folder has more banned words than it had, and the list of what they have is true."""

import importlib.util
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "prose.py"
SPEC = importlib.util.spec_from_file_location("prose", TOOL)
prose = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(prose)


def test_no_folder_has_more_banned_words_than_are_allowed():
    now, allowed = prose.counted(), prose.allowed()
    more = {folder: count for folder, count in now.items() if count > allowed.get(folder, 0)}
    assert not more, "`make prose ONLY=FOLDER` lists what to write in their place"
    fewer = {folder: count for folder, count in allowed.items() if now.get(folder, 0) < count}
    assert not fewer, "`make prose` lowers what is allowed"


def test_words_are_found_in_prose_and_not_in_code(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("It surely\nis `dear`, and\n\n```python\ndear = 1\n```\n\nno dear step.\n")
    assert [(found.line, found.text) for found in prose.findings(page)] == [
        (1, "surely"),
        (8, "dear"),
    ]
    module = tmp_path / "module.py"
    module.write_text('"""A step that is dear."""\n\ndear = "dear"  # nobody\n')
    assert {(found.line, found.text) for found in prose.findings(module)} == {
        (1, "dear"),
        (3, "nobody"),
    }
