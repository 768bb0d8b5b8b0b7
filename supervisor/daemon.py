"""The daemon's wiring: what is started in which order, and how it ends.

Lease first, since everything else belongs to its holder; then generations, workers and the gRPC
server; the endpoint is published last. The end runs backwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import _async as aio_health
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from modeld.shared.errors import InvalidRequest, ModeldError, NotOwner
from modeld.shared.ids import new_instance_id
from modeld.supervisor.cold_sweep import sweep_cold
from modeld.supervisor.config import Config, split_address
from modeld.supervisor.durable import private_folder
from modeld.supervisor.durable_sessions import DurableSessions
from modeld.supervisor.events import EventBus
from modeld.supervisor.evidence import EvidenceStore
from modeld.supervisor.fleet import HeartbeatLimits, WorkerKeeper
from modeld.supervisor.generation import GenerationStore
from modeld.supervisor.holdings import Holdings
from modeld.supervisor.launcher import LocalLauncher
from modeld.supervisor.lease import Lease
from modeld.supervisor.link import Link
from modeld.supervisor.model_slot import ModelSlot
from modeld.supervisor.models.store import ModelStore
from modeld.supervisor.planning import Planning, Probe
from modeld.supervisor.probes.machine import MachineProbe
from modeld.supervisor.process import own_log, sweep_leftovers
from modeld.supervisor.rpc.daemon_service import DaemonService
from modeld.supervisor.rpc.errors import hear_grpc
from modeld.supervisor.rpc.model_service import ModelService
from modeld.supervisor.rpc.services import Services
from modeld.supervisor.rpc.session_service import SessionService
from modeld.supervisor.saved_quota import SavedQuota
from modeld.supervisor.snapshots import SnapshotStore
from modeld.v1 import (
    daemon_pb2,
    daemon_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.5
TICK_S = 1.0
PRUNE_EVERY_S = 3600.0
FLUSH_S = 2.0  # for answers that are on their way when the last operation has ended
_OWN_SOCKET = ".s-"  # with eight characters behind, no longer than the known name
WORKER_MODULES = {
    "llama": "modeld.workers.llama",
    "openvino": "modeld.workers.openvino",
}
SERVICE_NAMES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (session_pb2, "SessionService"),
        (model_pb2, "ModelService"),
        (daemon_pb2, "DaemonService"),
    )
)
EXIT_OK, EXIT_CANNOT_START, EXIT_LOST_OWNER = 0, 1, 3


class Daemon:
    """One daemon over one data root. ``run`` returns the exit code."""

    def __init__(
        self,
        config: Config,
        worker_modules: dict[str, str] | None = None,
        probe: Probe | None = None,
    ) -> None:
        self.config = config
        self.owner_instance_id = new_instance_id()
        self.draining = False
        self.endpoints: tuple[str, ...] = ()
        self._modules = worker_modules or WORKER_MODULES
        self._stop = asyncio.Event()
        self._now = asyncio.Event()
        self._grace_s = config.drain_grace_s
        self._exit_code = EXIT_OK
        self._slots: dict[str, ModelSlot] = {}
        self._bus = EventBus()
        self._holdings = Holdings()
        self._probe = probe or MachineProbe()
        self._lease: Lease
        self._durable: DurableSessions

    # --- the gate that every call passes -------------------------------------------------------

    def check_owner(self) -> None:
        self._lease.check()

    # --- running -------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until drained. Raises ModeldError if it can't start, leaving nothing behind."""
        loop = asyncio.get_running_loop()
        if (address := split_address(self.config.listen)) is not None:
            _refuse_taken(*address)  # before anything is started that would have to be undone
        async with contextlib.AsyncExitStack() as stack:
            self._lease = Lease.acquire(
                self.config.data_root,
                instance_id=self.owner_instance_id,
                ttl_s=self.config.lease_ttl_s,
                backends=self.config.backends,
            )
            stack.callback(self._lease.release)
            sweep_leftovers(self.config.data_root)
            await asyncio.to_thread(sweep_cold, self.config)
            generations = GenerationStore.open(
                self.config.data_root, self._lease.record.generation_floor, self._lease.check
            )
            generations.bump("owner takeover")
            # The lease is a second witness of the generation, should its file be lost.
            self._lease.renew(generation_floor=generations.current)
            link = Link(self.owner_instance_id, HEARTBEAT_INTERVAL_S, self.config.data_root / "run")
            await link.start()
            stack.push_async_callback(link.close)
            store = await asyncio.to_thread(ModelStore, self.config.data_root)
            quota = SavedQuota(self.config.data_root, self.config.snapshot_quota_bytes)
            snapshots = await asyncio.to_thread(
                SnapshotStore, self.config.data_root, quota, self.config.snapshot_max_age_s
            )
            self._durable = DurableSessions(
                self.config.data_root,
                quota,
                max_age_s=self.config.snapshot_max_age_s,
                check_owner=self._lease.check,
            )
            await asyncio.to_thread(self._durable.start)
            evidence = EvidenceStore(self.config.data_root)
            for backend in self.config.backends:
                self._slots[backend] = self._start_slot(backend, link, store, generations, evidence)
            stack.push_async_callback(self._stop_workers)
            server, checks = self._build_server(store, generations, snapshots)
            await self._tell_health(checks, health_pb2.HealthCheckResponse.SERVING)
            stack.callback(self._remove_socket)
            self.endpoints = self._bind(server)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            keeping = loop.create_task(
                self._lease.keep(self._lost_owner, lambda: generations.current)
            )
            ticking = loop.create_task(self._tick())
            pruning = loop.create_task(self._prune(snapshots))
            stack.callback(keeping.cancel)
            stack.callback(ticking.cancel)
            stack.callback(pruning.cancel)
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signum, self._signalled)
            self._lease.publish(self.endpoints)
            logger.info("serving %s on %s", self.config.data_root, ", ".join(self.endpoints))
            await self._stop.wait()
            self.draining = True
            await self._tell_health(checks, health_pb2.HealthCheckResponse.NOT_SERVING)
            await self._finish_running(server)
        return self._exit_code

    def _start_slot(
        self,
        backend: str,
        link: Link,
        store: ModelStore,
        generations: GenerationStore,
        evidence: EvidenceStore,
    ) -> ModelSlot:
        slot = ModelSlot(
            backend,
            config=self.config,
            store=store,
            generations=generations,
            bus=self._bus,
            planning=Planning(backend, self.config, self._probe, evidence),
            holdings=self._holdings,
            durable=self._durable,
        )
        self._holdings.join(backend, slot.held)
        keeper = WorkerKeeper(
            backend,
            LocalLauncher(self._modules[backend], self.config.data_root),
            link,
            limits=HeartbeatLimits(
                silence_s=self.config.heartbeat_limit_s, slack_s=self.config.heartbeat_limit_s
            ),
            on_death=slot.worker_died,
            on_state=slot.worker_changed,
        )
        slot.attach_keeper(keeper)
        keeper.start()
        return slot

    def _build_server(
        self, store: ModelStore, generations: GenerationStore, snapshots: SnapshotStore
    ) -> tuple[grpc.aio.Server, Any]:
        hear_grpc()
        limit = self.config.max_message_bytes
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),
            ]
        )
        services = Services(self, self.config, store, self._slots, self._bus, snapshots)
        session_pb2_grpc.add_SessionServiceServicer_to_server(SessionService(services), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(services), server)
        daemon_pb2_grpc.add_DaemonServiceServicer_to_server(
            DaemonService(services, generations, lambda: self.endpoints, self.drain), server
        )
        checks = aio_health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        reflection.enable_server_reflection(
            (*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        return server, checks

    async def _tell_health(self, checks: Any, status: int) -> None:
        for name in ("", *SERVICE_NAMES):
            await checks.set(name, status)

    # --- where it listens -----------------------------------------------------------------------

    def _bind(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Bind; the endpoints. Raises InvalidRequest with what to do about a taken one."""
        if self.config.listen:
            return (self._bind_tcp(server, self.config.listen),)
        return (self._bind_unix(server, self.config.socket_path),)

    def _bind_unix(self, server: grpc.aio.Server, path: Path) -> str:
        # gRPC removes the path it bound when its server ends, whoever's socket is there by then.
        # So it binds a name that is this daemon's alone, and the known name is given up by us.
        own = path.with_name(f"{_OWN_SOCKET}{self.owner_instance_id[:8]}")
        if path.parent != self.config.data_root:
            private_folder(path.parent)
        before = os.umask(0o177)  # the socket must never exist with a wider mode
        try:
            for leftover in path.parent.glob(f"{_OWN_SOCKET}*"):
                leftover.unlink()
            server.add_insecure_port(f"unix:{own}")
            own.replace(path)  # the lease proves that no living daemon listens on it
        except (OSError, RuntimeError) as error:
            raise InvalidRequest.of(
                "data_root", str(path), "a folder for a socket", str(error)
            ) from None
        finally:
            os.umask(before)
        return f"unix:{path}"

    def _remove_socket(self) -> None:
        if not self.config.listen and self._lease.still_owner():
            self.config.socket_path.unlink(missing_ok=True)

    def _bind_tcp(self, server: grpc.aio.Server, listen: str) -> str:
        address = split_address(listen)
        assert address is not None  # checked with the configuration
        try:
            if self.config.tls:
                port = server.add_secure_port(listen, self._credentials())
            else:
                port = server.add_insecure_port(listen)
        except RuntimeError:
            raise _port_taken(listen, "it can't be bound") from None
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"{host}:{port}"

    def _credentials(self) -> grpc.ServerCredentials:
        ca = self.config.tls_client_ca
        return grpc.ssl_server_credentials(
            [(Path(self.config.tls_key).read_bytes(), Path(self.config.tls_cert).read_bytes())],
            root_certificates=Path(ca).read_bytes() if ca else None,
            require_client_auth=bool(ca),
        )

    # --- time-outs --------------------------------------------------------------------------------

    async def _tick(self) -> None:
        log = own_log(self.config.data_root / "logs" / "daemon.log")  # where `modeld run` began it
        while True:
            await asyncio.sleep(TICK_S)
            if log is not None:
                with contextlib.suppress(OSError):
                    log.trim()
            for slot in self._slots.values():
                try:
                    await slot.tick(asyncio.get_running_loop().time())
                except Exception:
                    logger.exception("time-outs of the %s slot", slot.backend)

    async def _prune(self, snapshots: SnapshotStore) -> None:
        while True:
            try:
                self._lease.check()
                await asyncio.to_thread(snapshots.prune)
                await self._durable.prune()
            except (ModeldError, OSError):
                logger.exception("removing what wasn't used for long")
            await asyncio.sleep(PRUNE_EVERY_S)

    # --- the end ---------------------------------------------------------------------------------

    def _signalled(self) -> None:
        if self._stop.is_set():
            logger.warning("stopping at once")
            self._now.set()
        self.drain(None)

    def drain(self, grace_s: float | None) -> tuple[int, int]:
        """Stop admitting; how many calls run and how many wait (those are refused)."""
        if grace_s is not None:
            self._grace_s = grace_s
        running = sum(slot.queue.snapshot().running for slot in self._slots.values())
        queued = sum(slot.queue.snapshot().queued for slot in self._slots.values())
        if not self._stop.is_set():
            logger.info("draining: %d running, %d queued", running, queued)
            self.draining = True
            for slot in self._slots.values():
                slot.begin_drain()
            self._bus.emit("drain")  # also ends the streams that watch
            self._stop.set()
        return running, queued

    def _lost_owner(self, error: NotOwner) -> None:
        logger.error("no longer the owner: %s", error.message)
        for slot in self._slots.values():
            slot.owner_lost(error.message)
        self._exit_code = EXIT_LOST_OWNER
        self.draining = True
        self._now.set()
        self._stop.set()

    async def _finish_running(self, server: grpc.aio.Server) -> None:
        """Let running calls finish within the grace, or until told to stop at once."""
        waiting = asyncio.ensure_future(self._until_quiet())
        hurry = asyncio.ensure_future(self._now.wait())
        await asyncio.wait(
            [waiting, hurry], timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not waiting.done():
            logger.warning("ending what still runs")
            for slot in self._slots.values():
                slot.end_grace()
            # The running calls end as SESSION_FATAL when their worker goes.
            await self._stop_workers(now=True)
        for task in (waiting, hurry):
            task.cancel()
        await server.stop(FLUSH_S)

    async def _until_quiet(self) -> None:
        for slot in self._slots.values():
            await slot.queue.quiet()

    async def _stop_workers(self, *, now: bool = False) -> None:
        now = now or self._now.is_set()
        await asyncio.gather(*(slot.keeper.stop(now=now) for slot in self._slots.values()))


def _refuse_taken(host: str, port: int) -> None:
    """Bind once ourselves: gRPC tells a taken port in words that help nobody."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _port_taken(f"{host}:{port}", error.strerror or str(error)) from None


def _port_taken(listen: str, why: str) -> InvalidRequest:
    return InvalidRequest.of(
        "listen",
        listen,
        "a host and a free port",
        f"The system says: {why}. Stop what listens there, choose another port with --listen "
        "(port 0 takes any free one), or leave it out to use a unix socket in the data root.",
    )


def run_daemon(config: Config) -> int:
    """Run a daemon in this process until it is drained; the exit code. Logs to stderr.

    Raises ModeldError if it can't start.
    """
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    return asyncio.run(Daemon(config).run())
