"""`spec.sessionStore`: the Redis that holds the session records."""

from pydantic import ConfigDict, Field

from dps_operator.api.types import APIObject, Name, Quantity, SecretKeyRef, rules


class ManagedStore(APIObject):
    """A Redis server that the operator deploys."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "quantity(string(self.size)).compareTo(quantity(string(oldSelf.size))) == 0",
                "sessionStore.managed.size cannot be changed; create a new DPSRouter, or use urlSecretRef",
            ),
            (
                "has(self.storageClassName) == has(oldSelf.storageClassName) &&"
                " (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
                "sessionStore.managed.storageClassName cannot be changed; create a new DPSRouter",
            ),
        )
    )

    size: Quantity = Field(default="1Gi", description="Size of the volume. Immutable.")
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


class SessionStore(APIObject):
    """The Redis that stores session records: a managed one unless urlSecretRef is set."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!(has(self.managed) && has(self.urlSecretRef))",
                "set either sessionStore.managed or sessionStore.urlSecretRef, not both",
            )
        )
    )

    managed: ManagedStore | None = Field(
        default=None, description="A Redis server that the operator deploys."
    )
    url_secret_ref: SecretKeyRef | None = Field(
        default=None, description="Secret key with the URL of your own Redis: redis://, rediss://, …"
    )
