"""What a new session finds around it beside its base: our init, a shell, the names of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from waypoint.build.lookup import find
from waypoint.errors import KernelError
from waypoint.guest.layer import build_guest_layer, guest_files
from waypoint.hostroot import mask_host, masked_paths
from waypoint.kernel import tools
from waypoint.kernel.network import resolv_conf
from waypoint.model import BaseRecord, Spec
from waypoint.store.store import Store

__all__ = ["find_shell", "guest_layer", "place_files"]


def find_shell(base: BaseRecord) -> str:
    for shell in ("/bin/bash", "/usr/bin/bash", "/bin/sh"):
        if find([Path(layer) for layer in base.layers], shell) is not None:
            return shell
    raise KernelError(f"base {base.source} has neither bash nor sh", base=base.id)


def guest_layer(store: Store, base: BaseRecord, hide: Sequence[Path]) -> int:
    """The layer with init and /dev; over the host's root also what hides the store and the secrets."""
    init = tools.init_path()
    kind = "guest-host" if base.kind == "host" else "guest"
    masks = masked_paths(store.paths, hide) if base.kind == "host" else []
    found, purpose = store.content_layer(
        f"{kind}-{'-'.join(masks)}" if masks else kind, [init, *guest_files()]
    )
    if found is not None:
        return found
    layer = store.new_layer("building")
    root = store.paths.upper(layer)
    root.mkdir(mode=0o755)
    build_guest_layer(root, init)
    if base.kind == "host":
        mask_host(root, masks)
    store.db.name_layer(layer, purpose)
    return layer


def place_files(store: Store, base: BaseRecord, spec: Spec, upper: int) -> None:
    """Names of hosts and name servers, where the base has none that fit."""
    wanted = {"etc/hosts": f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {spec.hostname}\n".encode()}
    if spec.network == "nat":
        wanted["etc/resolv.conf"] = resolv_conf()
    layers = [Path(layer) for layer in base.layers]
    for name, content in wanted.items():
        if name == "etc/hosts" and find(layers, f"/{name}") is not None:
            continue
        target = store.paths.upper(upper) / name
        if not target.parent.exists():
            target.parent.mkdir(mode=0o755)
        target.unlink(missing_ok=True)
        target.write_bytes(content)
        target.chmod(0o644)
