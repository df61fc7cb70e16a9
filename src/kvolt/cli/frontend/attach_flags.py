"""Flags for attached servers; `frontend.attach` itself is imported only when they are used."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def add_attach_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attach",
        action="append",
        default=[],
        metavar="URL[,NAME=VALUE...]",
        help="Route requests to a running vLLM or SGLang server; may be repeated. NAME is `events` (its KV event "
        "publisher, tcp://HOST:PORT), `replay`, `tokenizer`, `model`, `api_key` or another argument of the remote "
        "engine (`kvolt engine list remote`).",
    )
    parser.add_argument(
        "--kv-events",
        action=_AppendEvents,
        metavar="ENDPOINT",
        help="KV event publisher of the preceding --attach; the same as events=ENDPOINT.",
    )


class _AppendEvents(argparse.Action):
    """Append the event endpoint to the preceding `--attach`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if not namespace.attach:
            parser.error(f"{option_string} needs an --attach before it")
        namespace.attach[-1] += f",events={values}"
