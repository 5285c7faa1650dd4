"""The session store: a managed Redis, or the URL of an external one from a Secret."""

from dps_operator.api import quantity_bytes
from dps_operator.build.pods import (
    claim_spec,
    container_ports,
    container_resources,
    credential,
    pod_template,
    probes,
    secret_env,
    service,
)
from dps_operator.effective import Router
from dps_operator.errors import SpecError
from dps_operator.objects import Manifest, child_manifest, child_name, selector
from dps_operator.settings import Settings

REDIS_PORT = 6379
USER = 999
"""UID of the user `redis` in the official images."""
AUTH_DIR = "/etc/redis"
AUTH_FILE = "auth.conf"
URL_KEY = "url"
PASSWORD_KEY = "password"
SECRET_REVISION = "dpsrouter.io/redis-secret"
RESOURCES: Manifest = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}}
DATA_SHARE = 0.75
"""`maxmemory` of Redis as a part of the container's memory limit, because rewriting the append-only file copies memory.

With the default limit it is enough for about a million sessions."""
VOLUME_SHARE = 0.5
"""The largest `maxmemory` as a part of the volume. Redis appends to its file until its size has doubled and then writes
a new one beside it. A file is smaller than its data in memory. If the volume were full, Redis would refuse writes."""

LONGEST_STATEFUL_SET_NAME = 52
"""Longest name of a StatefulSet, in characters, whose pods can be created.

The controller appends a hyphen and a hash of up to ten characters for a label, whose value is limited to 63
(kubernetes#64023)."""


def redis_url(namespace: str, router_name: str, password: str) -> str:
    """The URL of the managed Redis, for the gateways."""
    return f"redis://:{password}@{router_name}-redis.{namespace}.svc:{REDIS_PORT}/0"


def managed_redis(router: Router, settings: Settings, revision: str) -> list[Manifest]:
    """One Redis server with its append-only file on a volume, and its Service; empty if the store is external.

    revision: identifies the password; a change restarts the server. Raises SpecError if the DPSRouter's name is too
    long.
    """
    store = router.redis
    if store is None:
        return []
    name = child_name(router, "redis")
    excess = len(name) - LONGEST_STATEFUL_SET_NAME
    if excess > 0:
        raise SpecError(
            "spec.sessionStore: a managed Redis requires a DPSRouter whose name has at most "
            f"{len(router.name) - excess} characters; use urlSecretRef, or choose another name"
        )
    resources = container_resources(RESOURCES, store.resources)
    memory = quantity_bytes(str(resources["limits"]["memory"])) * DATA_SHARE
    volume = quantity_bytes(store.size) * VOLUME_SHARE
    # For Redis, 0 would mean no limit.
    megabytes = max(int(min(memory, volume)) // 2**20, 1)
    ping = {"exec": {"command": ["sh", "-c", f"redis-cli -p {REDIS_PORT} ping | grep -q PONG"]}}
    container = {
        "name": "redis",
        "image": store.image or settings.redis_image,
        "command": ["redis-server", f"{AUTH_DIR}/{AUTH_FILE}"],
        "args": [
            *("--port", str(REDIS_PORT)),
            *("--dir", "/data"),
            *("--appendonly", "yes"),
            *("--appendfsync", "everysec"),
            # Snapshots would be written to the same volume, although the append-only file contains the same data.
            *("--save", ""),
            *("--maxmemory", f"{megabytes}mb"),
            # The shortest remaining TTL belongs to the session that has been idle the longest.
            *("--maxmemory-policy", "volatile-ttl"),
        ],
        "env": [secret_env("REDISCLI_AUTH", credential(router, "redis", PASSWORD_KEY))],
        "ports": container_ports(redis=REDIS_PORT),
        "resources": resources,
        **probes(ping),
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "auth", "mountPath": AUTH_DIR, "readOnly": True},
        ],
    }
    auth = credential(router, "redis", AUTH_FILE)
    items = [{"key": auth.key, "path": AUTH_FILE}]
    pod = {
        "containers": [container],
        "terminationGracePeriodSeconds": 60,
        "volumes": [
            {"name": "auth", "secret": {"secretName": auth.name, "items": items, "defaultMode": 0o440}}
        ],
    }
    template = pod_template(
        router, "redis", settings, pod, store.pod_template, {SECRET_REVISION: revision}, user=USER
    )
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    data = claim_spec(store.size, store.storage_class_name, "ReadWriteOnce")
    spec: Manifest = {
        "replicas": 1,
        "serviceName": name,
        # With OrderedReady, a pod that cannot start would not be replaced when its template is corrected.
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": selector(router, "redis")},
        # Session records expire within hours, so the volume is deleted with the store.
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
        "template": template,
        "volumeClaimTemplates": [claim | {"metadata": {"name": "data"}, "spec": data}],
    }
    # It has one endpoint, so nothing is gained by removing an unready one. Kubernetes marks all pods of a node as
    # unready whose lease has expired, for example after an outage of the API server, although Redis runs.
    own_service = service(router, "redis", {"redis": REDIS_PORT}, publishNotReadyAddresses=True)
    return [own_service, child_manifest(router, "StatefulSet", "redis", spec=spec)]
