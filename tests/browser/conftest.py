"""One browser for all tests, and a fresh page for each, or for all of a file."""

import pytest
from chromium import browser
from steps import opener


@pytest.fixture(scope="session")
def running():
    with browser() as running:
        yield running


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
