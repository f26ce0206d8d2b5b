"""The methods that docker and podman share: `*_build` and `*_attach`."""

from __future__ import annotations

from pathlib import Path

from statefork.backends.containers import ContainerDriver, Source
from statefork.registry import Argument, Method, directory, path, text, words

__all__ = ["ARGUMENTS", "container_methods"]

ARGUMENTS = {
    argument.name: argument
    for argument in (
        Argument("dockerfile_dir", directory, "a directory with a Dockerfile, built first"),
        Argument("base_image", text, "an image that is on this host"),
        Argument("container_name", text, "a running container"),
        Argument("extra_args", words, "more arguments for every `run`, as a list or one line"),
        Argument("export_dir", path, "where the archives of the snapshots are put"),
    )
}


def container_methods(driver: type[ContainerDriver]) -> tuple[Method, ...]:
    def build(
        dockerfile_dir: Path | None = None, base_image: str | None = None, extra_args: tuple[str, ...] = ()
    ) -> ContainerDriver:
        return driver(Source(dockerfile_dir=dockerfile_dir, base_image=base_image, extra_args=extra_args))

    def attach(container_name: str, base_image: str, extra_args: tuple[str, ...] = ()) -> ContainerDriver:
        return driver(Source(container_name=container_name, base_image=base_image, extra_args=extra_args))

    return (
        Method(
            f"{driver.name}_build",
            build,
            tuple(ARGUMENTS[name] for name in ("dockerfile_dir", "base_image", "extra_args")),
            required=(("dockerfile_dir", "base_image"),),
        ),
        Method(
            f"{driver.name}_attach",
            attach,
            tuple(ARGUMENTS[name] for name in ("container_name", "base_image", "extra_args")),
            required=(("container_name",), ("base_image",)),
            attach=True,
        ),
    )
