"""The page of an explanation, in a real browser: what it shows, and how it is used."""

import json
import re
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx
from batchax.execution.memory import show_bytes
from batchax.explain.page import as_embedded_page, as_page
from batchax.explain.wording import show_flops

from support.browser import browser
from support.explanations import array, layers, rich

WIDE = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}


@cache
def _page_of(make):
    return as_page(make())


@pytest.fixture(scope="module")
def chromium():
    with browser() as session:
        yield session


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The pages, as files: that is how they are opened offline."""
    place = tmp_path_factory.mktemp("pages")
    rich().to_html(place / "rich.html")
    (place / "layers.html").write_text(_page_of(layers), encoding="utf-8")
    cell = f"<!doctype html><meta charset=utf-8><h1>Cell</h1>{rich()._repr_html_()}"
    (place / "notebook.html").write_text(cell, encoding="utf-8")
    return place


@pytest.fixture
def page(chromium, files):
    """The rich page, freshly opened on a wide screen, in the light theme."""
    _screen(chromium, **WIDE)
    _system_theme(chromium, "light")
    chromium.get((files / "rich.html").as_uri())
    yield chromium
    chromium.execute_script("localStorage.clear()")
    assert _complaints(chromium) == []


def size(number):
    return show_bytes(round(number))


def _screen(session, **metrics):
    session.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def _system_theme(session, theme):
    features = [{"name": "prefers-color-scheme", "value": theme}]
    session.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def _complaints(session):
    return [entry["message"] for entry in session.get_log("browser")]


def _one(session, selector):
    from selenium.webdriver.support.ui import WebDriverWait

    # What opens is filled by an event, which comes later.
    return WebDriverWait(session, 20).until(lambda s: s.find_element("css selector", selector))


def _all(session, selector):
    return session.find_elements("css selector", selector)


def _summary(session, number):
    return session.execute_script(
        "return document.getElementById(arguments[0]).querySelector('summary')", f"e{number}"
    )


def _press(session, *keys):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    actions = ActionChains(session)
    for key in keys:
        actions.send_keys(getattr(Keys, key))
    actions.perform()


def _focused(session):
    """The number of the equation that has the focus, or what else has it."""
    return session.execute_script(
        """const at = document.activeElement, row = at.closest('.row');
        if (!row) return at.id || at.className || at.localName;
        return at.parentElement.classList.contains('part') ? 'part of ' + row.id : row.id;"""
    )


def _details(session, number):
    """The text of the opened details of an equation, with plain spaces."""
    session.execute_script(
        "document.getElementById(arguments[0]).querySelector('details').open = true", f"e{number}"
    )
    script = "return document.getElementById(arguments[0]).querySelector('.panel').textContent"
    return " ".join(session.execute_script(script, f"e{number}").split())


def test_it_asks_the_network_for_nothing_and_complains_of_nothing(page, files):
    page.get_log("performance")
    page.refresh()
    _summary(page, "3").click()
    sent = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [
        m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"
    ]
    assert asked == [(files / "rich.html").as_uri()]
    policy = _one(page, "meta[http-equiv='Content-Security-Policy']").get_attribute("content")
    assert policy.startswith("default-src 'none';")
    assert "script-src 'sha256-" in policy


def test_what_is_put_into_it_later_cannot_run(page):
    page.execute_script("document.body.append(document.createElement('section'))")
    page.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        "document.body.append(s); new Image().src = 'http://127.0.0.1:9/a.png'"
    )
    assert page.execute_script("return window.ran") is None
    assert len(_complaints(page)) == 2  # the script and the picture, both refused


def test_every_equation_is_there_with_its_figures(page):
    page.find_element("id", "open").click()
    for eqn in rich().walk():
        row = _summary(page, eqn.number)
        shown = row.text
        assert shown.startswith(eqn.number)
        assert eqn.primitive in shown
        assert f"{show_flops(eqn.work.flops)}, {size(eqn.work.bytes)}" in shown
        assert eqn.outputs[0].batched in shown
        assert size(eqn.outputs[0].bytes) in shown
        panel = _details(page, eqn.number)
        assert show_flops(eqn.per_lane.flops) in panel
        for value in (*eqn.inputs, *eqn.outputs):
            assert value.example in panel
        if eqn.source.file:
            assert f"{eqn.source.file.rsplit('/', 1)[-1]}:{eqn.source.line}" in panel


def test_the_keyboard_opens_and_walks(page):
    page.execute_script("arguments[0].focus()", _summary(page, "3"))
    _press(page, "ENTER")
    assert _one(page, "#e3 .panel").is_displayed()
    _press(page, "ARROW_LEFT")
    assert not _one(page, "#e3 .panel").is_displayed()
    _press(page, "ARROW_DOWN")
    assert _focused(page) == "e4"
    _press(page, "ARROW_DOWN", "ARROW_DOWN")
    assert _focused(page) == "e4.1"
    inner = _one(page, "[id='e4.3.1']")
    assert not inner.is_displayed()  # two deep: closed at first
    page.execute_script("arguments[0].focus()", _summary(page, "4.3"))
    _press(page, "ARROW_RIGHT")
    assert inner.is_displayed()
    _press(page, "ARROW_RIGHT", "ARROW_DOWN")
    assert _focused(page) == "e4.3.1"
    _press(page, "ARROW_LEFT")
    assert _focused(page) == "part of e4.3"
    _press(page, "ARROW_LEFT")
    assert not inner.is_displayed()
    _press(page, "ARROW_LEFT")
    assert _focused(page) == "e4.3"
    _press(page, "HOME")
    assert _focused(page) == "e1"
    _press(page, "END")
    assert _focused(page) == "e8"


def test_a_finding_leads_to_its_equation(page):
    kinds = [heading.text for heading in _all(page, ".finding h3")]
    assert [k.lower() for k in kinds] == [
        "loop waits for its slowest lane",
        "branch runs for all lanes",
        "sequentially",
    ]
    page.find_element("id", "close").click()
    link = _all(page, ".finding a.to")[2]
    assert link.text == "Go to equation 7.2, lane_solver"
    assert "<here>" in _all(page, ".finding")[2].text
    page.execute_script("arguments[0].focus()", link)
    _press(page, "ENTER")
    assert _focused(page) == "e7.2"
    target = _one(page, "[id='e7.2']")
    assert target.is_displayed()
    assert "here" in target.get_attribute("class").split()
    assert page.execute_script(
        "const box = document.activeElement.getBoundingClientRect();"
        "return box.top >= 0 && box.bottom <= innerHeight"
    )


def _search(page, text):
    from selenium.webdriver import ActionChains

    ActionChains(page).send_keys("/" + text).perform()
    shown = page.execute_script(
        "return [...document.querySelectorAll('.row, .again li, .lines tbody tr')]"
        ".filter(e => e.checkVisibility()).map(e => e.id.replace(/-.*/, ''))"
    )
    return shown, _one(page, "#found").get_property("value")


def test_search_keeps_what_has_all_the_words(page):
    shown, said = _search(page, "Sin steps.py")
    # What is found, inside of what it is in, which is opened for it; and lines.
    assert (shown, said) == (["e4", "e4.3", "e4.3.1", "s9"], "1 equation, 1 line")
    _press(page, "ENTER")
    assert _focused(page) == "e4.3.1"
    _press(page, "ENTER")
    assert _one(page, "[id='e4.3.1'] .panel").is_displayed()
    shown, said = _search(page, "zzz")
    assert (shown, said) == ([], "0 equations, 0 lines")
    _press(page, "ESCAPE")
    assert _one(page, "#found").get_property("value") == ""
    assert len([row for row in _all(page, ".row") if row.is_displayed()]) == 13
    # A link to what is not shown shows all again.
    _search(page, "exp")
    page.execute_script("arguments[0].click()", _all(page, ".finding a.to")[0])
    assert _focused(page) == "e4"


def test_what_repeats_is_one_row_that_opens(chromium, files):
    _screen(chromium, **WIDE)
    chromium.get((files / "layers.html").as_uri())
    rows = [row.text for row in _all(chromium, ".flow .row, .flow .again") if row.is_displayed()]
    assert len(rows) == 4
    assert rows[2].startswith("… 5 more times what 1 to 2 do: 3 to 12, ")
    assert rows[3].startswith("13")
    (rail,) = _all(chromium, '.rail.in.end[data-from="3"]')  # from the fold to what comes after it
    assert rail.is_displayed()
    chromium.execute_script("location.hash = '#e8'")
    assert _focused_id(chromium) == "e8"
    assert _one(chromium, "#e8").text == "8 v8 = tanh v7, like 2"
    _one(chromium, "#e8 a").click()
    assert _focused(chromium) == "e2"
    shown, said = _search(chromium, "tanh")
    assert said == "6 equations, 1 line"
    assert "e8" in shown
    assert _complaints(chromium) == []


def _focused_id(session):
    return session.execute_script("return document.activeElement.id")


def test_in_a_notebook_styles_do_not_leak(chromium, files):
    _screen(chromium, **WIDE)
    chromium.get((files / "notebook.html").as_uri())
    frame = _one(chromium, "iframe")
    assert frame.accessible_name == "How network was batched"
    assert 500 <= frame.size["height"] <= 902  # with its border
    font = chromium.execute_script(
        "return getComputedStyle(document.querySelector('h1')).fontFamily"
    )
    chromium.switch_to.frame(frame)
    assert _one(chromium, "h1").text == "network"
    assert _one(chromium, "h1").value_of_css_property("font-family") != font
    _one(chromium, ".finding a").click()
    assert _focused(chromium) == "e4"
    _one(chromium, "#theme").click()  # where nothing may be remembered
    assert _one(chromium, "html").get_attribute("data-theme") == "dark"
    chromium.switch_to.default_content()
    assert _complaints(chromium) == []


def _opened(session, tmp_path, text):
    _screen(session, **WIDE)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    session.get((tmp_path / "page.html").as_uri())


def real():
    """What `explain` says of a program with a loop and a branch."""

    def function(m, x):
        x, total = lax.scan(lambda h, _: (jnp.sin(m @ h), h.sum()), x, None, length=3)
        return lax.cond(total[0] > 0, jnp.exp, lambda x: -x, x)

    return bx.explain(function, in_axes=(None, 0))(jnp.eye(3), jnp.ones((4, 3)))


@pytest.mark.parametrize("make", [rich, layers, real])
def test_ids_are_unique_and_links_lead_somewhere(chromium, tmp_path, make):
    _opened(chromium, tmp_path, _page_of(make))
    ids, links = chromium.execute_script(
        "document.querySelectorAll('.row > .equation').forEach((box) => (box.open = true));"
        "return [[...document.querySelectorAll('[id]')].map(e => e.id),"
        "[...document.querySelectorAll('a')].map(a => decodeURIComponent(a.hash.slice(1)))]"
    )
    assert len(ids) == len(set(ids))
    assert set(links) <= set(ids)
    sections = [x for x in ids if x in ("findings", "summary", "program")]
    assert sections == ["findings", "summary", "program"]
    assert _complaints(chromium) == []


EVIL = '<img src=x onerror="document.title = 1"><!-- </script><script>document.title = 1</script>'


def evil():
    """An explanation in which everything of the user is markup."""
    explanation = rich()
    finding = replace(explanation.findings[0], kind=EVIL, message=EVIL, remedy=EVIL)
    first, *rest = explanation.equations
    first = replace(first, primitive=EVIL, rule=EVIL, emitted=(EVIL,), notes={EVIL: EVIL})
    first = replace(first, source=replace(first.source, file=EVIL, text=EVIL))
    odd = replace(array("q"), name=EVIL, example=EVIL, batched=EVIL, axis=0)
    first = replace(first, inputs=(odd,), outputs=(odd,), number="1")
    return replace(
        explanation,
        name=EVIL,
        options={EVIL: EVIL},
        arguments=(odd,),
        findings=(finding,),
        equations=(first, *rest),
    )


def test_everything_of_the_users_is_text(chromium, tmp_path):
    text = as_page(evil())
    assert "<img" not in text
    assert "<!--" not in text
    assert text.count("</script>") == 2
    data = re.search(r'id="data">(.*)</script>', text)[1]
    assert json.loads(data)["name"] == EVIL
    _opened(chromium, tmp_path, text)
    assert EVIL in _details(chromium, "1")
    assert chromium.execute_script("return document.images.length + document.scripts.length") == 2
    assert chromium.title == f"{EVIL}, batched over 8 lanes"
    assert _complaints(chromium) == []


def test_data_is_that_of_the_explanation():
    explanation = rich()
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["version"] == 1
    first = data["equations"][0]
    assert first["outputs"][0] == {
        "name": "a",
        "example": "f32[64]",
        "batched": "f32[64]",
        "axis": None,
        "bytes": 256,
        "literal": False,
        "result": "",
    }
    assert first["per_lane"] == first["work"]
    assert data["work"]["flops"] == explanation.work.flops
    assert data["timings"][4]["batch_size"] == "loop"
    assert data["options"]["batch_size"] is None


def test_an_embedded_page_is_the_page():
    from html import unescape

    text = as_embedded_page(evil())
    assert text.count("<") == 2  # the frame and its end: all else is quoted
    assert unescape(re.search(r'srcdoc="([^"]*)"', text)[1]) == as_page(evil())


def test_a_program_of_nothing_has_a_page(chromium, tmp_path):
    empty = replace(
        rich(), equations=(), findings=(), memory=None, timings=(), compiled=None, outputs=()
    )
    _opened(chromium, tmp_path, as_page(empty))
    text = _one(chromium, "main").text
    assert "0 equations" in text
    assert "Nothing found" in text
    assert _all(chromium, "#timings, #memory, #steps") == []
    assert _complaints(chromium) == []
