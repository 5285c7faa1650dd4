"""Session state in Redis (6.2 to 8) or Valkey: one round trip to read a turn's state, one script to commit it."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from hiredis import pack_command
from redis.asyncio import Redis, RedisCluster, Sentinel, SentinelConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError

MAX_CONNECTIONS: Final = 64

CONNECTION_RETRIES: Final = 1
"""Retries of commands on a new connection, which cover a Redis restart. The circuit breaker handles longer outages."""

FAILURES_TO_OPEN: Final = 3
PAUSE_SECONDS: Final = 1.0

_FAILURES: Final = (RedisError, RedisClusterException, OSError, TimeoutError)
"""The exceptions of redis-py. A cluster none of whose nodes can be reached raises RedisClusterException."""


class StoreUnavailable(Exception):
    """The backend timed out or returned an error."""


class ForeignValue(StoreUnavailable):
    """The key holds a value of another type, which this project did not write."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The first pointer found: its index among the keys, its value, and the record that it refers to."""

    rank: int
    pointer: bytes
    record: bytes | None


class _Script:
    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


# Look up a session by history: returns the first pointer that exists and the record it refers to. All keys share a
# hash tag, so the record is on the same cluster node although its key is not known in advance.
_FIND: Final = _Script("""
local pointers = redis.call('MGET', unpack(KEYS))
for rank, pointer in ipairs(pointers) do
  if pointer then
    local session = string.match(pointer, '^%["([^"]+)"')
    return {rank - 1, pointer, session and redis.call('GET', ARGV[1] .. session) or false}
  end
end
return false
""")

# Compare and set, and write a pointer (KEYS[2]), if any. Returns an empty array on success, or an array with the
# current value ("" if there is none).
_SWAP: Final = _Script("""
local current = redis.call('GET', KEYS[1]) or ''
if current ~= ARGV[1] then return {current} end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
if KEYS[2] then redis.call('SET', KEYS[2], ARGV[4], 'EX', ARGV[3]) end
return {}
""")

# Set one field of a hash, and return all fields.
_SET_FIELD: Final = _Script("""
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return redis.call('HGETALL', KEYS[1])
""")


Client = Redis | RedisCluster


def connect(url: str, timeout_seconds: float) -> Client:
    """A client for redis://, rediss://, redis+sentinel://HOST:PORT[,…]/DB?service=NAME or redis+cluster://.

    It connects on first use. Raises ValueError if the URL has another scheme or an unknown option.
    """
    options: dict[str, Any] = {
        "socket_timeout": None,  # `RedisBackend` limits each exchange as a whole, which costs less
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), CONNECTION_RETRIES, supported_errors=(RedisConnectionError,)),
    }
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss", "unix") or kind not in ("", "sentinel", "cluster"):
        raise ValueError(
            f"session.redisUrl: '{parts.scheme}://' is not supported: use redis://, rediss://, "
            "redis+sentinel:// or redis+cluster://"
        )
    if kind == "sentinel":
        return _master(parts, options)
    plain = urlunsplit((scheme, *parts[1:]))
    if kind == "cluster":
        return RedisCluster.from_url(plain, **options)
    return Redis.from_url(plain, max_connections=MAX_CONNECTIONS, **options)


def _master(url: SplitResult, options: dict[str, Any]) -> Redis:
    """A client for the master that sentinels name. Raises ValueError."""
    query = dict(parse_qsl(url.query))
    service, sentinel_password = query.pop("service", None), query.pop("sentinel_password", None)
    if service is None:
        raise ValueError("session.redisUrl: redis+sentinel:// needs ?service=NAME, the name of the master")
    if unknown := query.keys() - {"ssl_ca_certs"}:  # without their values, which may be passwords
        raise ValueError(f"session.redisUrl: unknown option {', '.join(sorted(unknown))}")
    credentials, _, hosts = url.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    nodes = [
        (host, int(port or 26379)) for host, _, port in (each.partition(":") for each in hosts.split(","))
    ]
    timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), options["socket_connect_timeout"])
    sentinel: Any = Sentinel  # the library leaves its constructor untyped
    manager = sentinel(nodes, sentinel_kwargs={"password": sentinel_password, **timeouts})
    master: Redis = manager.master_for(
        service,
        db=int(url.path.strip("/") or 0),
        username=unquote(username) or None,
        password=unquote(password) or None,
        ssl=url.scheme == "rediss+sentinel",
        **query,
        **options,
    )
    return master


class Breaker:
    """A circuit breaker: after consecutive failures, calls are rejected, except for one probe in PAUSE_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._retry_at = 0.0

    @property
    def open(self) -> bool:
        """Whether calls are rejected."""
        return self._failures >= FAILURES_TO_OPEN

    def allows(self) -> bool:
        """Whether a call may be made now. If the breaker is open and the call is allowed, the call is the probe."""
        if not self.open:
            return True
        now = self._clock()
        if now < self._retry_at:
            return False
        self._retry_at = now + PAUSE_SECONDS
        return True

    def succeeded(self) -> None:
        """Close the breaker."""
        self._failures = 0

    def failed(self) -> None:
        """Count a failure."""
        self._failures += 1
        self._retry_at = self._clock() + PAUSE_SECONDS


class RedisBackend:
    """The authoritative store. Commands issued in one event-loop iteration are pipelined.

    A circuit breaker bounds the time spent waiting for an unavailable Redis. Every method has a short timeout, and
    raises StoreUnavailable if it fails.
    """

    def __init__(
        self, client: Client, timeout_seconds: float, on_error: Callable[[str], None] = lambda kind: None
    ) -> None:
        self.client = client
        """The client in use."""
        self._timeout = timeout_seconds
        self._on_error = on_error
        self._breaker = Breaker()
        self._refused = False
        self._batch: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def degraded(self) -> bool:
        """Whether session state is currently not being written to Redis."""
        return self._breaker.open or self._refused

    def use(self, client: Client) -> None:
        """Use another client from now on. The previous one is closed when its commands in flight have ended."""
        self._flush()
        old, self.client = self.client, client
        self._breaker, self._refused = Breaker(), False
        self._background(_closed(old, self._timeout))

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._call("GET", key)
        return value

    async def find(self, pointer_keys: list[str], record_prefix: str) -> Hit | None:
        if not pointer_keys:
            return None
        reply = await self._eval(_FIND, pointer_keys, [record_prefix])
        return Hit(int(reply[0]), reply[1], reply[2] or None) if reply else None

    async def set(self, key: str, value: bytes, ttl_seconds: int) -> None:
        await self._call("SET", key, value, "EX", ttl_seconds)

    async def swap(
        self,
        key: str,
        expected: bytes | None,
        value: bytes,
        ttl_seconds: int,
        pointer: tuple[str, bytes] | None = None,
    ) -> tuple[bool, bytes | None]:
        """Compare and set: replace `expected` with `value` and write `pointer`, a key and a value.

        Returns (True, None), or (False, the current value) if it is not `expected`.
        """
        keys, arguments = [key], [expected or b"", value, ttl_seconds]
        if pointer is not None:
            keys.append(pointer[0])
            arguments.append(pointer[1])
        try:
            reply = await self._eval(_SWAP, keys, arguments)
        except StoreUnavailable:
            self._refused = True
            raise
        self._refused = False
        return not reply, (reply[0] or None) if reply else None

    async def delete(self, keys: Sequence[str]) -> bool:
        """Delete keys of one session. Returns whether any existed."""
        return bool(await self._call("DEL", *keys))

    async def set_field(self, key: str, field: str, value: bytes, ttl_seconds: int) -> dict[str, bytes]:
        """Set one field of a hash, and return all its fields."""
        reply: list[bytes] = await self._eval(_SET_FIELD, [key], [field, value, ttl_seconds])
        return {name.decode(): entry for name, entry in zip(reply[::2], reply[1::2], strict=True)}

    async def delete_fields(self, key: str, fields: Sequence[str]) -> None:
        """Delete fields of a hash."""
        await self._call("HDEL", key, *fields)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await _closed(self.client)

    async def _eval(self, script: _Script, keys: list[str], arguments: list[Any]) -> Any:
        try:
            return await self._call("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except NoScriptError:  # after a restart or failover
            return await self._call("EVAL", script.text, len(keys), *keys, *arguments)

    async def _call(self, *command: Any) -> Any:
        breaker = self._breaker
        if not breaker.allows():
            raise StoreUnavailable("the circuit breaker is open")
        try:
            reply = await self._send(command)
        except NoScriptError:
            breaker.succeeded()
            raise
        except _FAILURES as error:
            self._on_error(type(error).__name__)
            if isinstance(error, ResponseError):  # Redis responded, but is full, read-only or loading
                breaker.succeeded()
            else:
                breaker.failed()
            kind = ForeignValue if "WRONGTYPE" in str(error) else StoreUnavailable
            raise kind(str(error) or type(error).__name__) from error
        breaker.succeeded()
        return reply

    async def _send(self, command: tuple[Any, ...]) -> Any:
        if isinstance(self.client, RedisCluster):
            client: Any = self.client  # the library leaves its methods untyped
            async with asyncio.timeout(self._timeout):
                return await client.execute_command(*command)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if not self._batch:
            loop.call_soon(self._flush)
        self._batch.append((command, future))
        return await future

    def _flush(self) -> None:
        """Send the commands that were issued in this iteration of the event loop."""
        batch, self._batch = self._batch, []
        if batch:
            assert isinstance(self.client, Redis)
            self._background(self._send_batch(self.client, batch))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_batch(
        self, client: Redis, batch: list[tuple[tuple[Any, ...], asyncio.Future[Any]]]
    ) -> None:
        replies: list[Any]
        try:
            async with asyncio.timeout(self._timeout):
                replies = await _replies(client, [command for command, _ in batch])
        except Exception as error:  # any, because the callers wait for the futures without a limit
            replies = [error] * len(batch)
        except asyncio.CancelledError:  # the gateway is closing
            replies = [RedisConnectionError("closed")] * len(batch)
        for (_, future), reply in zip(batch, replies, strict=True):
            if future.done():  # the caller was cancelled
                continue
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)


async def _replies(
    client: Redis, commands: list[tuple[Any, ...]], retries: int = CONNECTION_RETRIES
) -> list[Any]:
    """The replies or errors of commands that are sent together.

    The connection is used directly, because redis-py's pipelines take twice the CPU time, and its encoding of a command
    eight times that of hiredis.
    """
    pool: Any = client.connection_pool  # the library leaves its methods untyped
    try:
        connection = await pool.get_connection()
        try:
            await connection.send_packed_command(map(pack_command, commands), check_health=False)
            return [await _reply(connection) for _ in commands]
        finally:
            await pool.release(connection)
    except RedisConnectionError:
        if retries == 0:
            raise
        return await _replies(client, commands, retries - 1)


async def _closed(client: Client, delay_seconds: float = 0.0) -> None:
    """Close a client's connections after a delay, or immediately if it is cancelled."""
    try:
        await asyncio.sleep(delay_seconds)
    finally:
        await client.aclose()
        pool = client.connection_pool if isinstance(client, Redis) else None
        if isinstance(pool, SentinelConnectionPool):  # redis-py leaves the sentinels' connections open
            await asyncio.gather(*(sentinel.aclose() for sentinel in pool.sentinel_manager.sentinels))


async def _reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
