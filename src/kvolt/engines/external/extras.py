"""Check of engine-specific request fields (`Request.extra`)."""

from __future__ import annotations

from collections.abc import Collection

from kvolt.core.errors import Unsupported
from kvolt.core.request import Request


def refuse_extra(request: Request, engine: str, known: Collection[str] = ()) -> None:
    """Unsupported for an unknown field; ignoring it would look like support."""
    for name in request.extra:
        if name not in known:
            raise Unsupported(f"{engine} does not support {name!r}", feature=name, param=name)
