"""Gateways of sandboxes: a model endpoint on the loopback of each sandbox whose trajectory has providers.

Providers are part of a trajectory's recorded environment, under names that never enter the sandbox; their keys are
secrets there.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence

from snapshotd.api.trajectories import Provider
from snapshotd.engine.context import Context
from snapshotd.engine.identity import SandboxIdentity
from snapshotd.engine.journal.pipeline import Journal
from snapshotd.engine.journal.wire.model_calls import ModelCalls
from snapshotd.engine.sandbox.live import LiveRecord
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.secrecy import PROVIDER
from snapshotd.errors import SandboxFailed, UsageError
from snapshotd.gateway.base import Gateway, GatewayHandler, Upstream
from snapshotd.gateway.base import ProviderKind as Family
from snapshotd.kernel.namespaces import in_network_namespace
from snapshotd.types import Trajectory, short

PORT = 11411
"""Port of the endpoint inside the sandbox: no process uses ports before the sandbox's first program."""
_BACKLOG = 64
_LISTENER = ".gateway"
"""Behind a container's id: the keeper's name of the socket."""
_KEY = "_KEY"
_MODEL = PROVIDER + "MODEL"
"""Environment name of the model that every request asks for, whatever the agent says."""

CAPTURE = PROVIDER + "CAPTURE_TOKENS"
"""Name in a trajectory's environment, with "1", where the gateway asks for token ids and log probabilities. Forks have
it, too, unless a variant gives it another value."""

GatewayMaker = Callable[[socket.socket, GatewayHandler, Mapping[str, Upstream], bool], Gateway]
"""The last argument: capture tokens."""


def provider_env(
    providers: Sequence[Provider], *, capture_tokens: bool
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Providers as a trajectory's environment records them: plain pairs, and secret ones. UsageError: a base URL that
    is none; tokens are to be captured, and no provider has any."""
    if capture_tokens and not any(Family(provider.kind) is Family.OPENAI for provider in providers):
        raise UsageError(
            "tokens are captured of OpenAI's APIs, as OpenAI, vLLM and others speak them, and no such provider was given; "
            "Anthropic's API has no token ids and no log probabilities, and Gemini's is not asked for them"
        )
    plain, secret = ([(CAPTURE, "1")] if capture_tokens else []), []
    for provider in providers:
        Upstream(provider.url, provider.api_key)  # refuses malformed values
        name = PROVIDER + provider.kind.upper()
        plain.append((name, provider.url))
        if provider.api_key:
            secret.append((name + _KEY, provider.api_key))
    return tuple(plain), tuple(secret)


def model_env(owner: Trajectory, model: str | None) -> tuple[tuple[str, str], ...]:
    """The model that the gateway of a fork of `owner` asks for, as its environment records it. UsageError: `owner` has
    no gateway."""
    if model is None:
        return ()
    if not any(PROVIDER + family.upper() in dict(owner.env) for family in Family):
        raise UsageError(
            f"the model of a fork of {short(owner.id)} cannot be {model[:80]!r}: no gateway sees its model requests; run "
            "the agent with a provider, or name the model in its arguments or environment"
        )
    return ((_MODEL, model),)


class Gateways:
    """Thread-safe."""

    def __init__(self, context: Context, make: GatewayMaker) -> None:
        self._context, self._make = context, make

    def environment(self, sandbox: Sandbox) -> dict[str, str]:
        """Environment variables by which a sandbox's commands find its gateway; empty if it has none."""
        if sandbox.gateway is None:
            return {}
        families = self._upstreams(sandbox)
        url = f"http://127.0.0.1:{sandbox.gateway.port}"
        token = SandboxIdentity.of(sandbox.trajectory.id).token  # in place of a key, because clients want one
        env = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        if Family.OPENAI in families:
            env |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": token}
        if Family.ANTHROPIC in families:
            env |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": token}
        if Family.GEMINI in families:
            env |= {"GOOGLE_GEMINI_BASE_URL": url, "GEMINI_API_KEY": token}
        return env

    def open(self, sandbox: Sandbox, journal: Journal, record: LiveRecord | None = None) -> None:
        """Give a sandbox its gateway, if its trajectory has providers. `record`: the live record from which an earlier
        daemon's gateway is gone on with. SandboxFailed."""
        upstreams = self._upstreams(sandbox)
        if not upstreams:
            return
        listener = self._listener(sandbox)
        calls = ModelCalls(self._context, journal)
        if record is not None:
            calls.restore(record)
        capture = dict(sandbox.trajectory.env).get(CAPTURE) == "1"
        sandbox.set_gateway(self._make(listener, calls, upstreams, capture))

    def _listener(self, sandbox: Sandbox) -> socket.socket:
        """The socket on which the sandbox's gateway listens: it outlives the daemon, so that clients wait for the next
        one and are not refused."""
        key = f"{sandbox.container.id}{_LISTENER}"
        sandbox.survival.kept.append(key)
        held = self._context.keeper.open_held(key)
        if held is not None:
            return socket.socket(fileno=held)
        try:
            listener = in_network_namespace(sandbox.container.pid, _listen)
        except OSError as exc:
            raise SandboxFailed(
                f"the gateway of {short(sandbox.trajectory.id)} cannot listen in its sandbox: {exc.strerror}"
            ) from exc
        self._context.keeper.hold(key, listener.fileno())
        return listener

    def _upstreams(self, sandbox: Sandbox) -> dict[str, Upstream]:
        env = dict(sandbox.trajectory.env)
        reveal = self._context.secrecy.of(sandbox.trajectory).reveal_text
        found: dict[str, Upstream] = {}
        for family in Family:
            url = env.get(PROVIDER + family.upper())
            if url is not None:
                key = env.get(PROVIDER + family.upper() + _KEY)
                model = env.get(_MODEL)
                key = None if key is None else reveal(key)
                found[family] = Upstream(reveal(url), key, model=None if model is None else reveal(model))
        return found


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", PORT))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
