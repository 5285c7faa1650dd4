"""The session store: a managed Redis, or the URL of an external one from a Secret."""

from dps_operator.api import ManagedStore, quantity_bytes, to_wire
from dps_operator.build.pods import container_resources, pod_template, pull_secrets, restricted
from dps_operator.effective import Router
from dps_operator.errors import SpecError
from dps_operator.objects import CREDENTIALS, Manifest, child_manifest, child_name, credential_entry, selector
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


def redis_url_source(router: Router) -> Manifest:
    """The `valueFrom` of the gateway's Redis URL."""
    reference = router.spec.session_store.url_secret_ref
    if reference is not None:
        return {"secretKeyRef": to_wire(reference)}
    return {"secretKeyRef": {"name": CREDENTIALS, "key": credential_entry(router.name, "redis", URL_KEY)}}


def redis_url(namespace: str, router_name: str, password: str) -> str:
    """The URL of the managed Redis, for the gateways."""
    return f"redis://:{password}@{router_name}-redis.{namespace}.svc:{REDIS_PORT}/0"


def _max_memory(resources: Manifest, size: str) -> str:
    """The value of `maxmemory`. size: that of the volume."""
    memory = quantity_bytes(str(resources["limits"]["memory"])) * DATA_SHARE
    volume = quantity_bytes(size) * VOLUME_SHARE
    # For Redis, 0 would mean no limit.
    return f"{max(int(min(memory, volume)) // 2**20, 1)}mb"


def _container(store: ManagedStore, settings: Settings, router_name: str) -> Manifest:
    resources = container_resources(RESOURCES, store.resources)
    ping = {"exec": {"command": ["sh", "-c", f"redis-cli -p {REDIS_PORT} ping | grep -q PONG"]}}
    password = {
        "secretKeyRef": {"name": CREDENTIALS, "key": credential_entry(router_name, "redis", PASSWORD_KEY)}
    }
    return {
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
            *("--maxmemory", _max_memory(resources, store.size)),
            # The shortest remaining TTL belongs to the session that has been idle the longest.
            *("--maxmemory-policy", "volatile-ttl"),
        ],
        "env": [{"name": "REDISCLI_AUTH", "valueFrom": password}],
        "ports": [{"name": "redis", "containerPort": REDIS_PORT, "protocol": "TCP"}],
        "resources": resources,
        "startupProbe": ping | {"periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 150},
        "readinessProbe": ping | {"periodSeconds": 5, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": ping | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "securityContext": restricted(USER)[1],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "auth", "mountPath": AUTH_DIR, "readOnly": True},
        ],
    }


def redis_stateful_set(router: Router, settings: Settings, store: ManagedStore, revision: str) -> Manifest:
    """One Redis server with its append-only file on a volume.

    revision: identifies the password; a change restarts the server. Raises SpecError if the DPSRouter's name is too
    long.
    """
    name = child_name(router, "redis")
    excess = len(name) - LONGEST_STATEFUL_SET_NAME
    if excess > 0:
        raise SpecError(
            "spec.sessionStore: a managed Redis requires a DPSRouter whose name has at most "
            f"{len(router.name) - excess} characters; use urlSecretRef, or choose another name"
        )
    template = pod_template(
        router,
        "redis",
        {
            "containers": [_container(store, settings, router.name)],
            "securityContext": restricted(USER)[0],
            "terminationGracePeriodSeconds": 60,
            **pull_secrets(settings),
            "volumes": [
                {
                    "name": "auth",
                    "secret": {
                        "secretName": CREDENTIALS,
                        "items": [
                            {"key": credential_entry(router.name, "redis", AUTH_FILE), "path": AUTH_FILE}
                        ],
                        "defaultMode": 0o440,
                    },
                }
            ],
        },
        store.pod_template,
        {SECRET_REVISION: revision},
    )
    claim: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": store.size}},
    }
    if store.storage_class_name is not None:
        claim["storageClassName"] = store.storage_class_name
    return child_manifest(
        router,
        "apps/v1",
        "StatefulSet",
        "redis",
        spec={
            "replicas": 1,
            "serviceName": name,
            # With OrderedReady, a pod that cannot start would not be replaced when its template is corrected.
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": selector(router, "redis")},
            # Session records expire within hours, so the volume is deleted with the store.
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
            "template": template,
            "volumeClaimTemplates": [
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": "data"},
                    "spec": claim,
                }
            ],
        },
    )


def redis_service(router: Router) -> Manifest:
    """The Service of the managed Redis.

    It has one endpoint, so nothing is gained by removing an unready one. Kubernetes marks all pods of a node as unready
    whose lease has expired, for example after an outage of the API server, although Redis runs.
    """
    port = {"name": "redis", "port": REDIS_PORT, "targetPort": "redis", "protocol": "TCP"}
    return child_manifest(
        router,
        "v1",
        "Service",
        "redis",
        spec={
            "type": "ClusterIP",
            "selector": selector(router, "redis"),
            "ports": [port],
            "publishNotReadyAddresses": True,
        },
    )
