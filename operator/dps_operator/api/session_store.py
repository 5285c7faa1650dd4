"""`spec.sessionStore`: the Redis that holds the session records."""

from pydantic import ConfigDict, Field

from dps_operator.api.types import APIObject, Name, PodTemplate, Quantity, Resources, SecretKeyRef, rules

CA_FILE = "/etc/dps-redis/ca.crt"
"""Where the gateways mount the certificate authorities of an external Redis."""
DEFAULT_SIZE = "1Gi"

SIZE_IS_IMMUTABLE = "sessionStore.managed.size cannot be changed; create a new DPSRouter, or use urlSecretRef"
CLASS_IS_IMMUTABLE = "sessionStore.managed.storageClassName cannot be changed; create a new DPSRouter"


class ManagedStore(APIObject):
    """A Redis server that the operator deploys."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "quantity(string(self.size)).compareTo(quantity(string(oldSelf.size))) == 0",
                SIZE_IS_IMMUTABLE,
            ),
            (
                "has(self.storageClassName) == has(oldSelf.storageClassName) &&"
                " (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
                CLASS_IS_IMMUTABLE,
            ),
        )
    )

    size: Quantity = Field(
        default=DEFAULT_SIZE,
        description="Size of the volume, of which Redis uses at most half for its data. Immutable.",
    )
    storage_class_name: Name | None = Field(
        default=None,
        description="Storage class of the volume; the cluster's default if unset. Immutable.",
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Container image of Redis or Valkey; if unset, the operator's default (redisImage in the "
        "chart's values).",
    )
    resources: Resources = Field(
        default=Resources(),
        description="Resources of the container. Redis uses at most three quarters of the memory limit, 512Mi by "
        "default, and half of the volume for its data. If this is not enough, it removes the sessions that have been "
        "idle the longest.",
    )
    pod_template: PodTemplate = Field(
        default=PodTemplate(),
        description="Pod template to merge into the generated one, for example with pull secrets and a node selector.",
    )


_SAME_KIND = (
    "has(self.urlSecretRef) || has(oldSelf.urlSecretRef) || has(self.managed) == has(oldSelf.managed)"
)
_SETTINGS = "(has(self.managed) ? self.managed : oldSelf.managed)"
"""The settings of a managed store that is, or was, described by the defaults alone."""


class SessionStore(APIObject):
    """The Redis that stores session records: a managed one unless urlSecretRef is set."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!(has(self.managed) && has(self.urlSecretRef))",
                "set either sessionStore.managed or sessionStore.urlSecretRef, not both",
            ),
            (
                "!has(self.caSecretRef) || has(self.urlSecretRef)",
                "sessionStore.caSecretRef requires sessionStore.urlSecretRef",
            ),
            (
                f"{_SAME_KIND} || quantity(string({_SETTINGS}.size)).compareTo(quantity('{DEFAULT_SIZE}')) == 0",
                SIZE_IS_IMMUTABLE,
            ),
            (f"{_SAME_KIND} || !has({_SETTINGS}.storageClassName)", CLASS_IS_IMMUTABLE),
            (
                "!has(self.timeoutSeconds) || self.timeoutSeconds > 0.0",
                "sessionStore.timeoutSeconds must be greater than 0",
            ),
        )
    )

    managed: ManagedStore | None = Field(
        default=None, description="A Redis server that the operator deploys."
    )
    url_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Secret key with the URL of your own Redis: redis://, rediss://, redis+sentinel:// or "
        "redis+cluster://. After a change of the Secret, the gateways connect to the new URL.",
    )
    timeout_seconds: float | None = Field(
        default=None,
        ge=0,
        le=60,
        description="Time limit of a gateway for a request to Redis, in seconds; more than 0, and 0.25 if unset. "
        "Afterwards, the gateway uses its copy of the session.",
    )
    mirror_records: int | None = Field(
        default=None,
        ge=0,
        le=100_000_000,
        description="Maximum number of records that each gateway process keeps in memory for use while Redis is "
        "unavailable; 50,000 if unset. A change restarts the gateways.",
    )
    ca_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Secret key with the certificate authorities of your own Redis. Add "
        f"?ssl_ca_certs={CA_FILE} to the URL.",
    )
