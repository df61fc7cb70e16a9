"""The SDKs' clients, and what they talk to: real processes, started once for each test runner."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from tests.compat.sdk import native as native_server
from tests.compat.sdk.native import Native
from tests.compat.sdk.server import Server, start
from tests.integration.processes import Bench

KEY = "any"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Bench(tmp_path_factory.mktemp("sdk")) as bench:
        yield asyncio.run(start(bench))


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.api, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def narrow(server: Server) -> Iterator[OpenAI]:
    """To the frontend that takes one request at a time, small ones, without unknown fields."""
    with OpenAI(base_url=server.narrow_api, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def aclient(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.api, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Native]:
    """Real weights, if small and random ones."""
    with Bench(tmp_path_factory.mktemp("native"), OMP_NUM_THREADS="1") as bench:
        yield asyncio.run(native_server.start(bench))


@pytest.fixture(scope="session")
def tiny(native: Native) -> Iterator[OpenAI]:
    """To the native engine."""
    with OpenAI(base_url=native.api, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def atiny(native: Native) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=native.api, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def litellm() -> Any:
    """The package. It takes seconds to import, which would delay every test process."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without it litellm asks GitHub for a list of prices
    import litellm

    litellm.suppress_debug_info = True
    return litellm
