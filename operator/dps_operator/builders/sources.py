"""Models that are not on the Hub: their paths in a container, volumes, and the init containers that download them.

A claim or an image is mounted. A folder of a bucket is downloaded by rclone, into a folder that is named after its URI.
"""

from dataclasses import dataclass
from typing import Literal

from dps_engines.pools import PoolName
from dps_operator.api.pools import SpeculativePoolSpec
from dps_operator.api.sources import GSSource, ModelSource, S3Source
from dps_operator.api.spec import Spec
from dps_operator.api.types import plain_env, to_wire
from dps_operator.builders.pods import CONTAINER_SECURITY
from dps_operator.builders.pool_engines import pool_of
from dps_operator.errors import SpecError
from dps_operator.resources import Manifest

Role = Literal["model", "draft"]
MOUNTS = "/mnt"
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
ENGINE_SECURITY = CONTAINER_SECURITY | {"readOnlyRootFilesystem": True}
"""rclone's container runs as the image's user, root, as engines do."""


@dataclass(frozen=True)
class Target:
    """The container that reads a model.

    name: the container. volume, folder: the volume to which models are downloaded, and where it is mounted.
    resources: of the init container. security: its security context. files: pattern of the files to download; all of
    them if empty.
    """

    name: str
    volume: str
    folder: str
    resources: Manifest
    security: Manifest
    files: str = ""


def draft_source(spec: Spec, pool: PoolName) -> ModelSource | None:
    """The source of the draft model of a pool; None if it has no draft model, or one on the Hub."""
    settings = pool_of(spec, pool)
    return settings.speculation.draft_source if isinstance(settings, SpeculativePoolSpec) else None


def model_path(source: ModelSource | None, role: Role, folder: str) -> str | None:
    """The path of a model in a container; None for a model on the Hub. folder: see Target."""
    if source is None:
        return None
    mounted = source.pvc or source.oci
    if mounted is not None:
        return f"{MOUNTS}/{role}/{mounted.path or ''}".rstrip("/")
    return f"{folder}/{_bucket(source).uri.replace('://', '/', 1)}".rstrip("/")


def _bucket(source: ModelSource) -> S3Source | GSSource:
    bucket = source.s3 or source.gs
    if bucket is None:
        raise SpecError("spec.model.source: set exactly one of pvc, s3, gs and oci")
    return bucket


def service_account(spec: Spec, pool: PoolName) -> Manifest:
    """The field `serviceAccountName` of an engine's pod; empty if no source needs one.

    Raises SpecError if the sources of the model and the draft need different ones.
    """
    sources = [spec.model.source, draft_source(spec, pool)]
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
        return _download(_bucket(source), role, target, image)
    if source.pvc is not None:
        volume: Manifest = {"persistentVolumeClaim": {"claimName": source.pvc.claim_name, "readOnly": True}}
    elif source.oci is not None:
        policy = {"pullPolicy": source.oci.pull_policy} if source.oci.pull_policy else {}
        volume = {"image": {"reference": source.oci.image, **policy}}
    name = f"{role}-source"
    mount = {"name": name, "mountPath": f"{MOUNTS}/{role}", "readOnly": True}
    return {
        "containers": [{"name": target.name, "volumeMounts": [mount]}],
        "volumes": [{"name": name, **volume}],
    }


def _download(bucket: S3Source | GSSource, role: Role, target: Target, image: str) -> Manifest:
    scheme, _, path = bucket.uri.rstrip("/").partition("://")
    env, volumes = _credentials(bucket, role)
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
            *_options(bucket),
            *([f"--include={target.files}"] if target.files else []),
            *("--stats=30s", "--stats-one-line", "--stats-log-level=NOTICE"),
        ],
        "env": env,
        "resources": target.resources,
        "securityContext": target.security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    return {"initContainers": [container], **({"volumes": volumes} if volumes else {})}


def _options(bucket: S3Source | GSSource) -> list[str]:
    """rclone's options for a bucket. Without credentials from a Secret, it uses those of the pod's environment."""
    if isinstance(bucket, GSSource):
        return ["--gcs-env-auth"]
    options = [f"--s3-provider={'Other' if bucket.endpoint else 'AWS'}", "--s3-env-auth"]
    options += [f"--s3-endpoint={bucket.endpoint}"] if bucket.endpoint else []
    return options + ([f"--s3-region={bucket.region}"] if bucket.region else [])


def _credentials(bucket: S3Source | GSSource, role: Role) -> tuple[list[Manifest], list[Manifest]]:
    """The variables and the volumes with the credentials for a bucket."""
    reference = bucket.credentials_secret_ref
    if reference is None:
        return [], []
    if isinstance(bucket, S3Source):
        keys = [(name, {"name": reference.name, "key": name}) for name in AWS_KEYS]
        return [{"name": name, "valueFrom": {"secretKeyRef": key}} for name, key in keys], []
    wire = to_wire(reference)
    secret = {"secretName": wire["name"], "items": [{"key": wire["key"], "path": CREDENTIALS_FILE}]}
    file = f"{CREDENTIALS_DIR}/{role}/{CREDENTIALS_FILE}"
    return plain_env({"GOOGLE_APPLICATION_CREDENTIALS": file}), [
        {"name": f"{role}-source-key", "secret": {**secret, "defaultMode": 0o444}}
    ]
