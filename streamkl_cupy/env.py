"""The ``STREAMKL_*`` environment variables; they are read here and nowhere else.

Each function reads its variable when it is called, so a change of ``os.environ`` counts from the
next call on. An unset variable and an empty one mean the same: the default.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

DEFAULT_CACHE_MEGABYTES = 512

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def cache_dir() -> Path | None:
    """Directory of the compiled kernels, from ``STREAMKL_CACHE_DIR``.

    Returns
    -------
    pathlib.Path or None
        An absolute path (a leading ``~`` is expanded), or None for the cache directory of the
        platform. Nothing is created or checked on disk.

    Raises
    ------
    ValueError
        If the path is not absolute: the cache would move with the working directory.

    Examples
    --------
    >>> import os
    >>> os.environ["STREAMKL_CACHE_DIR"] = "/var/tmp/kernels"
    >>> str(cache_dir())
    '/var/tmp/kernels'
    >>> del os.environ["STREAMKL_CACHE_DIR"]
    """
    text = _read("STREAMKL_CACHE_DIR")
    if text is None:
        return None
    path = Path(os.path.expanduser(text))
    if not path.is_absolute():
        raise _error("STREAMKL_CACHE_DIR", "an absolute path", text, "write the path in full")
    return path


def cache_size() -> int:
    """Most bytes that the cache may keep on disk, from ``STREAMKL_CACHE_SIZE`` (megabytes).

    Returns
    -------
    int
        Bytes: 10**6 times the value, by default 512 * 10**6.

    Raises
    ------
    ValueError
        If the value is not a whole number of megabytes of at least 1.

    Examples
    --------
    >>> import os
    >>> os.environ["STREAMKL_CACHE_SIZE"] = "64"
    >>> cache_size()
    64000000
    >>> del os.environ["STREAMKL_CACHE_SIZE"]
    """
    text = _read("STREAMKL_CACHE_SIZE")
    if text is None:
        return DEFAULT_CACHE_MEGABYTES * 10**6
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise _error(
            "STREAMKL_CACHE_SIZE",
            "a whole number of megabytes, at least 1",
            text,
            f"for example STREAMKL_CACHE_SIZE={DEFAULT_CACHE_MEGABYTES}",
        )
    return int(text) * 10**6


def choices() -> Path | bool:
    """Where tuned choices are kept, from ``STREAMKL_CHOICES``.

    Returns
    -------
    pathlib.Path or bool
        True (the default, and ``1 true yes on``): beside the compiled kernels. False (``0 false no
        off``): nowhere, and those that are there are ignored. An absolute path (a leading ``~`` is
        expanded): in this file.

    Raises
    ------
    ValueError
        For any other value.

    Examples
    --------
    >>> import os
    >>> os.environ["STREAMKL_CHOICES"] = "off"
    >>> choices()
    False
    >>> del os.environ["STREAMKL_CHOICES"]
    """
    text = _read("STREAMKL_CHOICES")
    if text is None or text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    path = Path(os.path.expanduser(text))
    if path.is_absolute():
        return path
    raise _error(
        "STREAMKL_CHOICES",
        f"an absolute path or one of {' '.join(_TRUE)} {' '.join(_FALSE)}",
        text,
        "set STREAMKL_CHOICES=0 to plan without what was tuned, or unset it",
    )


def debug() -> bool:
    """Whether to tell on stderr what is planned, compiled and loaded, from ``STREAMKL_DEBUG``.

    Returns
    -------
    bool
        True for ``1 true yes on``, False (the default) for ``0 false no off``, in any case.

    Raises
    ------
    ValueError
        For any other value.

    Examples
    --------
    >>> import os
    >>> os.environ["STREAMKL_DEBUG"] = "1"
    >>> debug()
    True
    >>> del os.environ["STREAMKL_DEBUG"]
    """
    text = _read("STREAMKL_DEBUG")
    if text is None or text.lower() in _FALSE:
        return False
    if text.lower() in _TRUE:
        return True
    raise _error(
        "STREAMKL_DEBUG",
        f"one of {' '.join(_TRUE)} {' '.join(_FALSE)}",
        text,
        "set STREAMKL_DEBUG=1 to see what runs, or unset it",
    )


def force() -> str | None:
    """Name of the kernel that the plan must use, from ``STREAMKL_FORCE``.

    Returns
    -------
    str or None
        A kernel's name such as ``forward_sm80``, or None to leave the choice to the plan. That of a
        forward kernel binds the forward, that of a backward kernel the generation (``sm80``,
        ``sm90``) of all of the backward. Whether such a kernel exists and fits the problem is for
        the plan to say.

    Raises
    ------
    ValueError
        If the value cannot be the name of a kernel.

    Examples
    --------
    >>> import os
    >>> os.environ["STREAMKL_FORCE"] = "forward_sm80"
    >>> force()
    'forward_sm80'
    >>> del os.environ["STREAMKL_FORCE"]
    """
    text = _read("STREAMKL_FORCE")
    if text is None:
        return None
    if not re.fullmatch(r"[a-z][a-z0-9_]*", text):
        raise _error(
            "STREAMKL_FORCE",
            "the name of one kernel",
            text,
            "for example STREAMKL_FORCE=forward_sm80",
        )
    return text


def _read(name: str) -> str | None:
    text = os.environ.get(name, "").strip()
    return text or None


def _error(name: str, expected: str, got: str, remedy: str) -> ValueError:
    return ValueError(f"{name}: expected {expected}, got {got!r}; {remedy}.")
