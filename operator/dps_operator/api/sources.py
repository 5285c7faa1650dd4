"""`spec.model.source` and `spec.pools.speculative.speculation.draftSource`: where engines read a model from."""

from typing import Literal

from pydantic import ConfigDict, Field

from dps_operator.api.types import APIObject, Name, SecretKeyRef, rules

_RELATIVE = r"^[^/]"
"""The path does not begin with a slash."""
_NO_PARENT = (
    "!has(self.path) || !self.path.split('/').exists(part, part == '..')",
    "source.path must not contain '..'",
)


class ClaimSource(APIObject):
    """A folder of a PersistentVolumeClaim, which is mounted read-only."""

    model_config = ConfigDict(json_schema_extra=rules(_NO_PARENT))

    claim_name: Name = Field(
        description="Name of the claim. Pods on several nodes require the access mode ReadOnlyMany or ReadWriteMany."
    )
    path: str | None = Field(
        default=None,
        pattern=_RELATIVE,
        max_length=1024,
        description="Folder of the model in the volume; its root if unset.",
    )


class ImageSource(APIObject):
    """An OCI image or artifact, which is mounted read-only as an image volume."""

    model_config = ConfigDict(json_schema_extra=rules(_NO_PARENT))

    image: str = Field(
        min_length=1,
        max_length=512,
        description="Reference of the image or artifact. Image volumes are enabled by default from Kubernetes 1.35 on, "
        "and with the feature gate ImageVolume from 1.31 on. The container runtime must support them too.",
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the image is pulled, as in a container."
    )
    path: str | None = Field(
        default=None,
        pattern=_RELATIVE,
        max_length=1024,
        description="Folder of the model in the image; its root if unset.",
    )


_SERVICE_ACCOUNT = (
    "ServiceAccount of the engine pods, to which the cloud grants access by workload identity. The gateway keeps its "
    "own ServiceAccount, <name>-gateway, which needs the same access unless model.tokenizer is set."
)
_ONE_IDENTITY = (
    "!(has(self.credentialsSecretRef) && has(self.serviceAccountName))",
    "set either source.credentialsSecretRef or source.serviceAccountName, not both",
)

_NO_PARENT_IN_URI = ("!self.uri.split('/').exists(part, part == '..')", "source.uri must not contain '..'")


class CredentialsSecret(APIObject):
    """A Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""

    name: Name = Field(description="Name of the Secret.")


class S3Source(APIObject):
    """A folder of a bucket with the API of Amazon S3, which an init container downloads."""

    model_config = ConfigDict(json_schema_extra=rules(_ONE_IDENTITY, _NO_PARENT_IN_URI))

    uri: str = Field(
        pattern=r"^s3://[a-zA-Z0-9][a-zA-Z0-9._-]+(/[^/]+)*/?$",
        max_length=1024,
        description="The folder, as s3://BUCKET/PATH.",
    )
    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^/]",
        max_length=512,
        description="URL of the service, for storage other than Amazon S3.",
    )
    region: str | None = Field(
        default=None, min_length=1, max_length=64, description="Region of the bucket, such as eu-central-1."
    )
    credentials_secret_ref: CredentialsSecret | None = Field(
        default=None, description="Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
    )
    service_account_name: Name | None = Field(default=None, description=_SERVICE_ACCOUNT)


class GSSource(APIObject):
    """A folder of a Google Cloud Storage bucket, which an init container downloads."""

    model_config = ConfigDict(json_schema_extra=rules(_ONE_IDENTITY, _NO_PARENT_IN_URI))

    uri: str = Field(
        pattern=r"^gs://[a-zA-Z0-9][a-zA-Z0-9._-]+(/[^/]+)*/?$",
        max_length=1024,
        description="The folder, as gs://BUCKET/PATH.",
    )
    credentials_secret_ref: SecretKeyRef | None = Field(
        default=None, description="Secret key with the JSON key of a Google service account."
    )
    service_account_name: Name | None = Field(default=None, description=_SERVICE_ACCOUNT)


class ModelSource(APIObject):
    """Where the files of a model are, if not on the Hugging Face Hub."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.pvc), has(self.s3), has(self.gs), has(self.oci)].exists_one(one, one)",
                "set exactly one of source.pvc, source.s3, source.gs and source.oci",
            )
        )
    )

    pvc: ClaimSource | None = Field(default=None, description="A folder of an existing volume.")
    s3: S3Source | None = Field(
        default=None,
        description="A folder of an S3 bucket. It is downloaded to the volume of model.cache or, without one, to the "
        "node's disk at each start of a pod.",
    )
    gs: GSSource | None = Field(
        default=None,
        description="A folder of a Google Cloud Storage bucket. It is downloaded as with s3.",
    )
    oci: ImageSource | None = Field(default=None, description="An OCI image or artifact.")
