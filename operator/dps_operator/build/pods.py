"""Pod templates: secure defaults, models from other places than the Hub, and the user's template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dps_operator.api import (
    MERGE_KEYS,
    GSSource,
    ModelSource,
    PodTemplate,
    Resources,
    S3Source,
    SecretKeyRef,
    quantity_value,
    to_wire,
)
from dps_operator.effective import MOUNTS, EffectivePool, Role, Router, bucket_of
from dps_operator.errors import SpecError
from dps_operator.objects import (
    CREDENTIALS,
    Component,
    Manifest,
    child_manifest,
    credential_entry,
    given,
    labels,
    selector,
)
from dps_operator.settings import Settings

_HANDLERS = frozenset({"exec", "grpc", "httpGet", "sleep", "tcpSocket"})
UNIONS = {
    "env": frozenset({"value", "valueFrom"}),
    "startupProbe": _HANDLERS,
    "readinessProbe": _HANDLERS,
    "livenessProbe": _HANDLERS,
    "preStop": _HANDLERS,
    "postStart": _HANDLERS,
}
"""Fields of which an object may have only one, by the field that holds the object. In a volume, which is not listed,
these are all fields except the name."""

CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
READ_ONLY: Manifest = CONTAINER_SECURITY | {"readOnlyRootFilesystem": True}


def _without_alternatives(base: Manifest, over: Manifest, key: str) -> Manifest:
    """`base` without the members of a union that exclude the one that `over` sets, as `emptyDir` does `hostPath`."""
    members = (base.keys() | over.keys()) - {"name"} if key == "volumes" else UNIONS.get(key, frozenset())
    if not members & over.keys():
        return base
    return {field: value for field, value in base.items() if field not in members or field in over}


def overlay(base: Any, over: Any, key: str = "") -> Any:
    """`base` merged with `over`: objects by field, keyed lists by key; other values are replaced.

    A member of a union, such as the source of a volume, replaces a different member. key: name of the field that
    holds the two values, which selects the merge key of a list and the union of an object."""
    if isinstance(base, dict) and isinstance(over, dict):
        merged = dict(_without_alternatives(base, over, key))
        for field, value in over.items():
            merged[field] = overlay(merged[field], value, field) if field in merged else value
        return merged
    merge_key = MERGE_KEYS.get(key)
    if merge_key and isinstance(base, list) and isinstance(over, list):
        by_key = {item.get(merge_key): item for item in base}
        for item in over:
            existing = by_key.get(item.get(merge_key))
            by_key[item.get(merge_key)] = overlay(existing, item, key) if existing else item
        return list(by_key.values())
    return over


def container_resources(defaults: Manifest, overrides: Resources) -> Manifest:
    """A container's resources: the defaults, overridden by the spec.

    The API server refuses a request above the limit, so a default request is lowered to a limit of the spec, and a
    default limit is raised to a request of the spec.
    """
    limits, requests = overrides.limits or {}, overrides.requests or {}
    lowered = {
        name: min(amount, limits.get(name, amount), key=quantity_value)
        for name, amount in defaults.get("requests", {}).items()
    }
    raised = {
        name: max(amount, requests.get(name, amount), key=quantity_value)
        for name, amount in defaults.get("limits", {}).items()
    }
    merged = {"requests": {**lowered, **requests}, "limits": {**raised, **limits}}
    return {part: amounts for part, amounts in merged.items() if amounts}


def plain_env(env: Mapping[str, str]) -> list[Manifest]:
    """A container's `env` with these names and values, in the same order."""
    return [{"name": name, "value": value} for name, value in env.items()]


def secret_env(name: str, reference: SecretKeyRef) -> Manifest:
    """An environment variable with a value from a Secret."""
    return {"name": name, "valueFrom": {"secretKeyRef": to_wire(reference)}}


def credential(router: Router, component: Component, name: str) -> SecretKeyRef:
    """One of the random values of a DPSRouter."""
    return SecretKeyRef(name=CREDENTIALS, key=credential_entry(router.name, component, name))


def container_ports(**ports: int) -> list[Manifest]:
    """A container's `ports`, by their names."""
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def probes(handler: Manifest, *, live: Manifest | None = None) -> Manifest:
    """The probes of a small server, which starts within five minutes. live: the handler of the liveness probe."""
    live = live or handler
    return {
        "startupProbe": live | {"periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 150},
        "readinessProbe": handler | {"periodSeconds": 5, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": live | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }


def volume(container: str, name: str, folder: str, *, read_only: bool = False, **source: Any) -> Manifest:
    """What to merge into a pod spec so that a container has a volume. source: the volume's other fields."""
    mount = {"name": name, "mountPath": folder} | ({"readOnly": True} if read_only else {})
    return {
        "containers": [{"name": container, "volumeMounts": [mount]}],
        "volumes": [{"name": name, **source}],
    }


def claim_spec(size: str, storage_class: str | None, mode: str = "ReadWriteMany") -> Manifest:
    """The spec of a PersistentVolumeClaim that the operator creates."""
    spec: Manifest = {"accessModes": [mode], "resources": {"requests": {"storage": size}}}
    return spec | ({} if storage_class is None else {"storageClassName": storage_class})


def service(router: Router, component: Component, ports: Mapping[str, int], **spec: Any) -> Manifest:
    """The Service of a component's pods. ports: by name, which is that of the container's port as well."""
    body: Manifest = {
        "type": "ClusterIP",
        "selector": selector(router, component),
        "ports": [
            {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
            for name, port in ports.items()
        ],
    }
    return child_manifest(router, "Service", component, spec=body | spec)


def pod_template(
    router: Router,
    component: Component,
    settings: Settings,
    spec: Manifest,
    over: PodTemplate | None = None,
    annotations: dict[str, str] | None = None,
    *,
    user: int | None = None,
) -> Manifest:
    """The pod template of a component, merged with the user's. Labels of the selector cannot be overridden.

    user: with which the pod satisfies the restricted Pod Security Standard, unless its containers have security
    contexts of their own.
    """
    container = CONTAINER_SECURITY
    pod: Manifest = {"seccompProfile": {"type": "RuntimeDefault"}}
    if user is not None:
        pod |= {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
        container = READ_ONLY
    defaults = {"securityContext": container, "terminationMessagePolicy": "FallbackToLogsOnError"}
    template: Manifest = {
        "metadata": {"labels": labels(router, component)},
        "spec": {
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "securityContext": pod,
            **spec,
        },
    }
    for field in ("initContainers", "containers"):
        if field in spec:
            template["spec"][field] = [defaults | container for container in spec[field]]
    if settings.pull_secrets:
        template["spec"]["imagePullSecrets"] = [{"name": name} for name in settings.pull_secrets]
    if annotations:
        template["metadata"]["annotations"] = annotations
    if over is not None:
        template = overlay(template, to_wire(over))
        template["metadata"]["labels"] |= labels(router, component)
    return template


def spread(router: Router, component: Component) -> list[Manifest]:
    """Prefers different zones and nodes for the replicas of a component."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(router, component)},
        }
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]


CREDENTIALS_DIR = "/etc/dps-source"
CREDENTIALS_FILE = "key.json"
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
TOKENIZER_FILES = "/*.{json,jinja,model,tiktoken,txt}"
"""rclone's pattern for the files of a tokenizer, which excludes weights and subfolders."""
DOWNLOAD = (
    'uri=$1 from=$2 to=$3; shift 3; rclone copy "$from" "$to" "$@" || exit; '
    'if [ -z "$(ls -A "$to" 2>/dev/null)" ]; then echo "$uri contains no file of the model" >&2; exit 1; fi'
)
"""Shell script that downloads a folder. A folder that does not exist is an empty one for rclone."""
REMOTES = {"s3": "s3", "gs": "gcs"}
"""rclone's name of each kind of storage."""
ENGINE_RESOURCES: Manifest = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}


@dataclass(frozen=True)
class Target:
    """The container that reads a model.

    name: the container. volume, folder: the volume to which models are downloaded, and where it is mounted.
    resources: of the init container. files: pattern of the files to download; all of them if empty.
    """

    name: str
    volume: str
    folder: str
    resources: Manifest
    files: str = ""


def service_account(router: Router, pool: EffectivePool) -> Manifest:
    """The field `serviceAccountName` of an engine's pod; empty if no source needs one.

    Raises SpecError if the sources of the model and the draft need different ones.
    """
    sources = [router.spec.model.source, pool.draft_source]
    buckets = [source.s3 or source.gs for source in sources if source is not None]
    names = {bucket.service_account_name for bucket in buckets if bucket and bucket.service_account_name}
    if len(names) > 1:
        raise SpecError(
            "spec.pools.speculative.speculation.draftSource: a pod has one ServiceAccount, so serviceAccountName must "
            "be that of spec.model.source"
        )
    return {"serviceAccountName": names.pop()} if names else {}


def source_additions(source: ModelSource | None, role: Role, target: Target, image: str) -> Manifest:
    """What to merge into a pod spec so that a container can read a model; empty for a model on the Hub.

    image: of rclone.
    """
    if source is None:
        return {}
    if source.s3 is not None or source.gs is not None:
        return _download(bucket_of(source), role, target, image)
    if source.pvc is not None:
        content: Manifest = {"persistentVolumeClaim": {"claimName": source.pvc.claim_name, "readOnly": True}}
    elif source.oci is not None:
        content = {"image": given(reference=source.oci.image, pullPolicy=source.oci.pull_policy)}
    return volume(target.name, f"{role}-source", f"{MOUNTS}/{role}", read_only=True, **content)


def _download(bucket: S3Source | GSSource, role: Role, target: Target, image: str) -> Manifest:
    scheme, _, path = bucket.uri.rstrip("/").partition("://")
    env: list[Manifest] = []
    volumes: list[Manifest] = []
    # Without credentials from a Secret, rclone uses those of the pod's environment.
    if isinstance(bucket, GSSource):
        options = ["--gcs-env-auth"]
        if (key := bucket.credentials_secret_ref) is not None:
            file = f"{CREDENTIALS_DIR}/{role}/{CREDENTIALS_FILE}"
            env = plain_env({"GOOGLE_APPLICATION_CREDENTIALS": file})
            items = [{"key": key.key, "path": CREDENTIALS_FILE}]
            secret = {"secretName": key.name, "items": items, "defaultMode": 0o444}
            volumes = [{"name": f"{role}-source-key", "secret": secret}]
    else:
        options = [f"--s3-provider={'Other' if bucket.endpoint else 'AWS'}", "--s3-env-auth"]
        options += [f"--s3-endpoint={bucket.endpoint}"] if bucket.endpoint else []
        options += [f"--s3-region={bucket.region}"] if bucket.region else []
        if (keys := bucket.credentials_secret_ref) is not None:
            env = [secret_env(name, SecretKeyRef(name=keys.name, key=name)) for name in AWS_KEYS]
    mounts: list[Manifest] = [{"name": target.volume, "mountPath": target.folder}]
    mounts += [
        {"name": volume["name"], "mountPath": f"{CREDENTIALS_DIR}/{role}", "readOnly": True}
        for volume in volumes
    ]
    container = {
        "name": f"{role}-source",
        "image": image,
        "command": [
            # Pods that share the volume download one after the other; the later ones find the files complete.
            *("flock", f"{target.folder}/.{scheme}.lock"),
            *("sh", "-c", DOWNLOAD, "download"),
            *(f"{scheme}://{path}", f":{REMOTES[scheme]}:{path}", f"{target.folder}/{scheme}/{path}"),
        ],
        "args": [
            "--config=/dev/null",
            *options,
            *([f"--include={target.files}"] if target.files else []),
            *("--stats=30s", "--stats-one-line", "--stats-log-level=NOTICE"),
        ],
        "env": env,
        "resources": target.resources,
        # The user is that of the image, or of the pod.
        "securityContext": READ_ONLY,
        "volumeMounts": mounts,
    }
    return {"initContainers": [container], **({"volumes": volumes} if volumes else {})}
