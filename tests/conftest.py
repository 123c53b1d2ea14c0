"""What every test gets."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.plain import PlainRuns
from tests.support.serving import Server


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the machine's figures apart from the user's: the first run of the session takes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def plain_runs() -> PlainRuns:
    """Return what makes each run of plain PyTorch once; a worker of the session has its own."""
    return PlainRuns()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Yield the process that forks runs; it is begun by the first test that asks for it."""
    server = Server()
    yield server
    server.close()
