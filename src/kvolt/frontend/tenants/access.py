"""AccessGuard: authenticates requests by API key and checks what the key allows."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from kvolt.core.errors import ConfigError, KvoltError
from kvolt.frontend.model import Model
from kvolt.frontend.models import Models
from kvolt.frontend.openai_api.errors import InsufficientPermissions, InvalidApiKey
from kvolt.frontend.openai_api.headers import TENANT
from kvolt.frontend.tenants.budgets import Account, Budgets, TenantRequest, take_request
from kvolt.frontend.tenants.live_keys import LiveKeys
from kvolt.frontend.tenants.records import Caller, KeyTable, Scope, Tenant
from kvolt.frontend.tenants.usage import UNKNOWN, UsageMeter
from kvolt.runtime.clock import Clock
from kvolt.runtime.http.server import AnyResponse, Handler, HttpRequest
from kvolt.runtime.network import is_loopback, split_address

log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 60.0
_PROXY_HEADERS = frozenset({"forwarded", "x-forwarded-for", "x-real-ip"})


class AccessGuard:
    """Checks keys before handlers run. Without keys there is no guard."""

    def __init__(self, keys: LiveKeys, budgets: Budgets, clock: Clock) -> None:
        self.usage = UsageMeter()
        self.keys = keys
        self._budgets = budgets
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._callers: dict[str | None, Caller] = {}
        """By the `authorization` header of valid keys that were used: to hash a key costs as much as all other
        checks."""
        self._refusals = _RefusalLog(clock.monotonic)
        keys.on_change = self._on_change

    def _on_change(self, table: KeyTable) -> None:
        self._accounts.clear()
        self._callers.clear()
        self._budgets.retain(table.tenants.keys())

    def protect(self, handler: Handler, scope: Scope) -> Handler:
        """The handler for callers with this scope. Administration needs no key from this machine itself."""
        local_is_allowed = scope is Scope.ADMIN

        def guarded(request: HttpRequest) -> Awaitable[AnyResponse]:
            if not (local_is_allowed and _is_local(request)):
                request.caller = self._authorize(request.headers, scope)
            return handler(request)

        return guarded

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Caller with the key in `authorization` or `x-api-key`. Raises InvalidApiKey."""
        caller = self._callers.get(headers.get("authorization"))
        if caller is None:
            caller = self._find(headers)
        expires = caller.key.expires
        if expires is not None and self._clock.wall() >= expires:
            self._refuse(caller.tenant.name, "expired_key")
            raise InvalidApiKey("the API key has expired")
        return caller

    def _find(self, headers: Mapping[str, str]) -> Caller:
        secret = _secret(headers)
        if secret is None:
            self._refuse(UNKNOWN, "missing_key")
            raise InvalidApiKey("no API key: send it as `authorization: Bearer KEY` or `x-api-key: KEY`")
        caller = self.keys.table.find(secret)
        if caller is None:
            self._refuse(UNKNOWN, "invalid_key")
            raise InvalidApiKey("incorrect API key")
        header = f"Bearer {secret}"
        if headers.get("authorization") == header:  # one form only, so that there is one entry for each key
            self._callers[header] = caller
        return caller

    async def begin(self, http: HttpRequest) -> TenantRequest | None:
        """Admit a generation within its tenant's limits; None without a caller. Raises RateLimited."""
        caller = caller_of(http)
        if caller is None:
            return None
        request = TenantRequest(self._account(caller.tenant))
        await request.begin()
        return request

    async def take_request(self, http: HttpRequest) -> None:
        """Charge a request that generates nothing. Raises RateLimited."""
        caller = caller_of(http)
        if caller is not None:
            await take_request(self._account(caller.tenant))

    def find_model(self, models: Models, name: str | None, caller: Caller | None) -> Model:
        """The ready model of a request, if its tenant may use it.

        Raises the errors of `Models.get`, and InsufficientPermissions, which does not disclose whether a forbidden
        model exists."""
        if caller is None or not caller.tenant.models:
            return models.get(name)
        try:
            model = models.get(name)
        except KvoltError:
            if name is None or caller.allows((name,)):
                raise
            raise self._denied(caller, name) from None
        if not caller.allows(names_of(models, model)):
            raise self._denied(caller, name or model.name)
        return model

    # ---

    def _account(self, tenant: Tenant) -> Account:
        account = self._accounts.get(tenant.name)
        if account is None or account.tenant is not tenant:
            budget = self._budgets.of(tenant) if tenant.is_limited else None
            account = Account(tenant, budget, self.usage.of(tenant.name))
            self._accounts[tenant.name] = account
        return account

    def _authorize(self, headers: Mapping[str, str], scope: Scope) -> Caller:
        caller = self.authenticate(headers)
        if scope not in caller.key.scopes:
            self._refuse(caller.tenant.name, "scope")
            raise InsufficientPermissions(
                f"insufficient permissions: the API key lacks the scope {scope.value!r}"
            )
        for header in TENANT:
            if header in headers and headers[header] != caller.tenant.name:
                self._refuse(caller.tenant.name, "tenant")
                raise InsufficientPermissions(f"the header {header} names another tenant than the API key")
        return caller

    def _denied(self, caller: Caller, name: str) -> InsufficientPermissions:
        tenant = caller.tenant.name
        self._refuse(tenant, "model")
        return InsufficientPermissions(
            f"tenant {tenant!r} does not have access to model {name[:100]!r}",
            code="model_not_found",
            param="model",
        )

    def _refuse(self, tenant: str, reason: str) -> None:
        self.usage.of(tenant).count_refusal(reason)
        self._refusals.count(tenant, reason)


def caller_of(request: HttpRequest) -> Caller | None:
    """Authenticated sender; None where no key is needed."""
    caller: Caller | None = request.caller
    return caller


def names_of(models: Models, model: Model) -> list[str]:
    """Names by which a tenant may be allowed a model: its own and its aliases, or that of an adapter."""
    return [model.name] if model.lora is not None else [model.name, *models.names_of(model)]


class _RefusalLog:
    """One log line for all refusals of a minute, however many keys an attacker tries."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._next_at = 0.0
        self._num_unlogged = 0

    def count(self, tenant: str, reason: str) -> None:
        self._num_unlogged += 1
        now = self._now()
        if now >= self._next_at:
            self._next_at = now + _LOG_INTERVAL_S
            log.warning(
                "API requests refused: last_tenant=%s last_reason=%s count=%d",
                tenant,
                reason,
                self._num_unlogged,
            )
            self._num_unlogged = 0


def _secret(headers: Mapping[str, str]) -> str | None:
    """Key of the headers; `authorization` is used if both are present."""
    authorization = headers.get("authorization")
    if authorization is None:
        return headers.get("x-api-key")
    scheme, _, secret = authorization.partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def _is_local(request: HttpRequest) -> bool:
    """Whether the client is on this machine and is not a proxy that forwards another client's request."""
    try:
        host = split_address(request.peer)[0]
    except ConfigError:
        return False
    return is_loopback(host.removeprefix("::ffff:")) and _PROXY_HEADERS.isdisjoint(request.headers)
