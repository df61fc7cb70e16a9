"""The flags of `--attach`. Apart from `attach`, which most frontends have no use for in their memory."""

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
        help="put the router in front of a vLLM or SGLang server that runs already (repeat for more). NAME is events "
        "(where it publishes KV events, tcp://HOST:PORT), replay, tokenizer, model, api_key, or any other argument "
        "of `kvolt engine list remote`",
    )
    parser.add_argument(
        "--kv-events",
        action=_OfTheLast,
        metavar="ENDPOINT",
        help="the same as events=ENDPOINT of the --attach before it",
    )


class _OfTheLast(argparse.Action):
    """Belongs to the `--attach` before it."""

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
