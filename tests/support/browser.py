"""A real browser, for tests of pages."""

import shutil
from contextlib import contextmanager

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage "
    "--no-first-run --disable-background-networking --disable-component-update --disable-sync "
    "--disable-default-apps --disable-extensions --force-prefers-reduced-motion"
)


@contextmanager
def browser():
    """Chromium without a window; skips the test where there is none."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip(
            "needs Chromium and its driver: apt-get install -y chromium chromium-driver "
            "(make test does that on Debian, as root)"
        )
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for option in _OPTIONS.split():
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield session
    finally:
        session.quit()
