"""Run nftables commands in this process, through libnftables.

One call is 1-2 ms where the `nft` program costs its start each time. The library opens its socket in the calling
thread's network namespace.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from waypoint.errors import HostUnsupported, KernelError

__all__ = ["hold_nft", "run_nft"]

_lock = threading.Lock()
"""libnftables counts its users in a plain static variable, and its parser was not made for threads."""

_library: ctypes.CDLL | None = None


def _load() -> ctypes.CDLL:
    global _library
    if _library is None:
        try:
            library = ctypes.CDLL("libnftables.so.1")
        except OSError as error:
            raise HostUnsupported(
                f"network nat needs nftables: {error}; run `apt-get install nftables`",
                fix="apt-get install nftables",
                feature="nftables",
            ) from error
        library.nft_ctx_new.argtypes = [ctypes.c_uint32]
        library.nft_ctx_new.restype = ctypes.c_void_p
        for name in ("nft_ctx_buffer_output", "nft_ctx_buffer_error", "nft_ctx_free"):
            getattr(library, name).argtypes = [ctypes.c_void_p]
        library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        for name in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
            getattr(library, name).argtypes = [ctypes.c_void_p]
            getattr(library, name).restype = ctypes.c_char_p
        _library = library
    return _library


def run_nft(commands: str) -> str:
    """Do all of the commands in one transaction, or none; what they print. KernelError with nft's own words."""
    with _lock:
        library = _load()
        context = _context(library)
        try:
            return _run(library, context, commands)
        finally:
            library.nft_ctx_free(context)


def hold_nft(commands: str) -> Callable[[], None]:
    """Like `run_nft`, with a socket that stays open until the returned function is called.

    A table with `flags owner` lives exactly as long: the kernel removes it even if this process is killed.
    """
    with _lock:
        library = _load()
        context = _context(library)
        try:
            _run(library, context, commands)
        except BaseException:
            library.nft_ctx_free(context)
            raise

    def release() -> None:
        with _lock:
            library.nft_ctx_free(context)

    return release


def _context(library: ctypes.CDLL) -> int:
    context: int | None = library.nft_ctx_new(0)
    if not context:
        raise KernelError("nftables gave no context; out of memory?")
    library.nft_ctx_buffer_output(context)
    library.nft_ctx_buffer_error(context)
    return context


def _run(library: ctypes.CDLL, context: int, commands: str) -> str:
    failed = library.nft_run_cmd_from_buffer(context, commands.encode())
    output: bytes = library.nft_ctx_get_output_buffer(context) or b""
    words: bytes = library.nft_ctx_get_error_buffer(context) or b""
    if failed:
        raise KernelError(f"nftables refused: {words.decode(errors='replace').strip()}", commands=commands)
    return output.decode(errors="replace")
