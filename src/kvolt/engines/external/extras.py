"""What a request brings for one engine alone (`Request.extra`): passed over in silence it would be taken for done."""

from __future__ import annotations

from collections.abc import Collection

from kvolt.core.errors import Unsupported
from kvolt.core.request import Request


def refuse_extra(request: Request, engine: str, known: Collection[str] = ()) -> None:
    """Unsupported for what the engine is not told of."""
    for name in request.extra:
        if name not in known:
            raise Unsupported(f"{engine} is not told of {name!r}", feature=name, param=name)
