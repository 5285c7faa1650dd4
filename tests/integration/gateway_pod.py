"""The pod of a gateway as a process, with the configuration, variables and files that its manifests give it.

Paths of the pod are mapped to a folder. Discovery needs a cluster, so the engines are named by their URLs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dps_operator.objects import Manifest
from dps_testkit.processes import Engine, Gateway, LocalProcesses


@dataclass(frozen=True)
class GatewayPod:
    """The objects of a gateway's pod: its Deployment, and the data of the ConfigMap and the Secrets that it mounts."""

    deployment: Manifest
    config_map: Manifest
    secrets: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, objects: Sequence[Manifest], secrets: Mapping[str, Mapping[str, str]]) -> "GatewayPod":
        """The pod of the Deployment among the children of one DPSRouter. secrets: plain values, by name and key."""
        named = {one["kind"]: one for one in objects if one["metadata"]["name"].endswith("-gateway")}
        return cls(named["Deployment"], named["ConfigMap"], secrets)

    @property
    def _spec(self) -> Manifest:
        spec: Manifest = self.deployment["spec"]["template"]["spec"]
        return spec

    def _mounts(self) -> dict[str, Manifest]:
        """The volumes by the path at which they are mounted."""
        volumes = {volume["name"]: volume for volume in self._spec["volumes"]}
        (container,) = self._spec["containers"]
        return {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}

    def mapped(self, text: str, folder: Path) -> str:
        """`text` with the paths of all mounts in `folder`, except that of the temporary folder."""
        paths = sorted(self._mounts().keys() - {"/tmp"}, key=len, reverse=True)
        return re.sub(f"(?:{'|'.join(map(re.escape, paths))})/", lambda found: f"{folder}{found[0]}", text)

    def _files(self, volume: Manifest) -> dict[str, str]:
        """The files of a volume. Raises KeyError if a Secret or a key of it is missing."""
        if "configMap" in volume:
            data: dict[str, str] = self.config_map["data"]
            return data
        if "secret" in volume:
            data = dict(self.secrets[volume["secret"]["secretName"]])
            items = volume["secret"].get("items")
            return {item["path"]: data[item["key"]] for item in items} if items else data
        return {}

    def write(self, folder: Path) -> None:
        """Write the files of all volumes, as the kubelet does."""
        for path, volume in self._mounts().items():
            target = Path(f"{folder}{path}")
            target.mkdir(parents=True, exist_ok=True)
            for name, text in self._files(volume).items():
                (target / name).write_text(self.mapped(text, folder))

    def environment(self, folder: Path) -> dict[str, str]:
        """The variables with a value or a value from a Secret."""
        (container,) = self._spec["containers"]
        found = {}
        for variable in container["env"]:
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None:
                found[variable["name"]] = self.mapped(
                    self.secrets[reference["name"]][reference["key"]], folder
                )
            elif "value" in variable:
                found[variable["name"]] = self.mapped(f"{variable['value']}/", folder).removesuffix("/")
        return found

    async def start(self, processes: LocalProcesses, folder: Path, engines: Mapping[str, Engine]) -> Gateway:
        """Start the gateway. engines: one for each pool. Ports are free ones of 127.0.0.1."""
        self.write(folder)
        (container,) = self._spec["containers"]
        file = Path(self.mapped(container["args"][-1], folder))
        config: dict[str, Any] = yaml.safe_load(self.mapped(self.config_map["data"][file.name], folder))
        del config["configMap"]
        config["pools"] = {pool: {"endpoints": [engine.url]} for pool, engine in engines.items()}
        return await processes.start_gateway_of(file, config, self.environment(folder))
