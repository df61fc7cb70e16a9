"""URL of a server that kvolt calls."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from kvolt.core.errors import ConfigError
from kvolt.runtime.network import join_address


class ServerUrl(msgspec.Struct, frozen=True):
    """URL of a server, with its API key. `text` is the form shown to users."""

    text: str
    host: str
    port: int
    path: str
    is_secure: bool
    api_key: str = ""

    @classmethod
    def parse(cls, text: str, api_key: str | None = None) -> ServerUrl:
        """Parse an http or https URL; the scheme is optional. Raises ConfigError."""
        text = text.strip()
        remedy = "write it as http://HOST:PORT"
        if not text or not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError(f"invalid URL {text!r}", key="url", remedy=remedy)
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"invalid URL {text}: {error}", key="url", remedy=remedy) from error
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                "the URL has user info, a query or a fragment",
                key="url",
                remedy=f"{remedy}; set the API key separately",
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(f"invalid server URL {text}", key="url", remedy=remedy)
        key = (api_key or "").strip()
        if not (key.isascii() and (key.isprintable() or not key)):
            raise ConfigError("the API key contains invalid characters", key="api_key", remedy="check it")
        is_secure = parts.scheme == "https"
        path = parts.path.rstrip("/")
        shown = f"{parts.scheme}://{parts.netloc}{path}"
        return cls(shown, parts.hostname, port or (443 if is_secure else 80), path, is_secure, key)

    def of_api(self) -> ServerUrl:
        """URL of the OpenAI API: as given if it has a version, else with /v1."""
        path = re.sub(r"/(chat/)?completions$", "", self.path)
        return self._with_path(path if re.search(r"/v\d\w*(/|$)", path) else f"{path}/v1")

    def of_server(self) -> ServerUrl:
        """URL of the server without /v1, since not all its paths are below it."""
        return self._with_path(self.path.removesuffix("/v1"))

    def _with_path(self, path: str) -> ServerUrl:
        return replace(self, text=self.text.removesuffix(self.path) + path, path=path)

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)
