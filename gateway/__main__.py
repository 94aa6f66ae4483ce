"""`baton gateway`: the HTTP front as a process."""

import asyncio
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from random import Random

import uvicorn
import uvloop

from common.config import GatewayCommand, GatewayOptions
from common.errors import ConfigError, RequestError
from common.ids import PeerId
from common.link_out import MAX_OUTBOX
from common.links import Links
from common.log import set_up_logging
from common.metrics import GatewayMetrics
from common.model_files import ModelFiles, find_model, longest_sequence
from common.service import LinkEvent
from common.supervisor.channel import SupervisorChannel
from common.wire import GatewayStatus
from gateway.api import Api, Limits
from gateway.app import create_app
from gateway.engine import GatewayEngine, new_peer_id
from gateway.fleet import Fleet
from gateway.life import LifePolicy
from gateway.requests import Requests
from gateway.served_model import load_served_model

logger = logging.getLogger(__name__)

FLUSH_S = 1
"""For the event that ends streams when the drain is over to be read."""


def run(command: GatewayCommand, channel: SupervisorChannel | None) -> int:
    """Serve until stopped; return the exit code. Raises: ConfigError, ModelError when it cannot start."""
    set_up_logging(command.gateway.name or "gateway", command.log.log_level, command.log.log_format)
    files = find_model(command.model.model)
    listener = _listen(command.http.host, command.http.port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(command, channel, files, listener))
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Raises: ConfigError when the address is taken or is none of ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host and --port: cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


async def _serve(
    command: GatewayCommand, channel: SupervisorChannel | None, files: ModelFiles, listener: socket.socket
) -> None:
    max_model_len = longest_sequence(files, command.model.max_model_len)
    model = load_served_model(files, command.model.served_model_name, int(time.time()))
    options, http = command.gateway, command.http
    peer = new_peer_id(options.name or f"gateway-{socket.gethostname()}-{os.getpid()}")

    def status_for(worker: PeerId | None) -> GatewayStatus:
        return engine.status_for(worker)

    def deliver(event: LinkEvent) -> None:
        engine.deliver(event)

    def warn(worker: str, problem: str) -> None:
        logger.warning("worker %s cannot serve %s: %s", worker, model.name, problem)

    links = Links(peer, options.bind, options.advertise_host, status_for, deliver, _max_outbox(options))
    engine = GatewayEngine(
        peer,
        Requests(Fleet(files.model_hash, warn), _policy(command), Random()),
        max_model_len,
        send=links.send,
        is_healthy=lambda: links.is_alive,
        address=links.address,
    )
    links.start()
    limits = Limits(max_body_bytes=http.max_body_bytes, client_timeout_s=http.client_timeout)
    metrics = GatewayMetrics(model.name, engine.workers, lambda: {**links.counters(), **engine.totals()})
    app = create_app(
        Api(backend=engine, model=model, limits=limits, metrics=metrics),
        version=_version(),
        api_keys=http.api_key,
        allowed_origins=http.allowed_origins,
    )
    config = uvicorn.Config(
        app,
        http="httptools",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(options.drain_timeout + FLUSH_S),
    )
    server = _Server(config, engine, options.drain_timeout)
    watch = asyncio.create_task(engine.watch())
    watch.add_done_callback(lambda _: server.stop())
    tasks = [asyncio.create_task(_report(engine, listener, channel)), watch]
    try:
        await server.serve(sockets=[listener])
        if watch.done():  # it was no signal that stopped the server
            await watch
    finally:
        for task in tasks:
            task.cancel()
        links.close(flush_s=0.5)


class _Server(uvicorn.Server):
    """When it is told to stop, takes nothing new, lets streams end, and then ends what is left by a terminal frame."""

    def __init__(self, config: uvicorn.Config, engine: GatewayEngine, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s

    def stop(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Stop on SIGTERM and SIGINT, and leave it at that: being told to stop is no failure."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("draining for at most %.0f s", self._drain_timeout_s)
        error = RequestError(503, "the gateway is shutting down", type="service_unavailable", retry_after_s=1)
        asyncio.get_running_loop().call_later(self._drain_timeout_s, self._engine.fail_all, error)
        await super().shutdown(sockets)


def _max_outbox(options: GatewayOptions) -> int:
    """All requests may wait for one worker and go to it at once, each after the cancel of an attempt before."""
    return max(MAX_OUTBOX, 2 * options.max_concurrent_requests)


def _policy(command: GatewayCommand) -> LifePolicy:
    options = command.gateway
    return LifePolicy(
        max_concurrent_requests=options.max_concurrent_requests,
        request_timeout_s=options.request_timeout,
        when_no_prefill=options.when_no_prefill,
        no_worker_timeout_s=options.no_worker_timeout,
        resume_timeout_s=options.resume_timeout,
        max_attempts=options.max_attempts,
    )


async def _report(engine: GatewayEngine, listener: socket.socket, channel: SupervisorChannel | None) -> None:
    """Tell the operator and the supervisor how far the start has come."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{host}:{port}"
    logger.info("listening at %s, workers join at %s", url, engine.address)
    if channel:
        channel.listening(url)
    await engine.wait_for_pools()
    logger.info("every pool has a live worker")
    if channel:
        channel.pools_live()


def _version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:
        return "0"
