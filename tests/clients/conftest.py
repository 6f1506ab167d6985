"""Fixtures of the tests of clients that are built upon `openai`: those of ../python, and where the deployment is."""

import os
import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / "python"))
# Before it is imported: its table of prices comes with it, and nothing is asked of anybody else.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ.setdefault("LANGSMITH_TRACING", "false")

from test_structured import caller, client  # noqa: E402, F401 (fixtures)


@pytest.fixture(scope="session")
def served(client):
    """Base URL and key of the deployment, as every client of OpenAI's API is told them."""
    return {"base_url": str(client.base_url), "api_key": client.api_key}


@pytest.fixture(scope="session")
def tools(caller):
    """The same of a model of random weights that is shown tools."""
    return {"base_url": str(caller.base_url), "api_key": caller.api_key}
