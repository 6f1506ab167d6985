"""One browser for all tests, and a fresh page for each, or for all of a file."""

import contextlib

import pytest
from chromium import Page, browser
from steps import MODELS_SHOWN, URL


@pytest.fixture(scope="session")
def running():
    with browser() as running:
        yield running


@contextlib.contextmanager
def opener(running):
    """Opens the page, with answers in the server's place if any are given, and waits until it shows the models."""
    pages = []

    def open_page(view="chat", answers=(), until=MODELS_SHOWN, **options):
        page = Page(running, **options)
        pages.append(page)
        for answer in answers:
            page.answer(*answer)
        page.open(f"{URL}#/{view}")
        if until:
            page.until(until)
        return page

    yield open_page
    for page in pages:
        page.close()


@pytest.fixture
def open_page(running):
    with opener(running) as open_page:
        yield open_page


@pytest.fixture(scope="module")
def keep_page(running):
    """The same for pages that the tests of a file share."""
    with opener(running) as open_page:
        yield open_page


@pytest.fixture
def page(open_page):
    return open_page()
