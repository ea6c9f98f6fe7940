"""Classes and functions named in a config by dotted path."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, TypeVar

T = TypeVar("T")


class PluginError(ValueError):
    """A dotted path that leads nowhere, or to the wrong kind of thing; names the key and the fix."""


def load_object(path: str, *, key: str) -> Any:
    """What `package.module:name` names.

    Args:
        key: the config key the path stands under, for the message.

    Raises:
        PluginError: no such module or name, or the module fails to import.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise PluginError(f"{key}: {path!r} is not of the form package.module:Name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            hint = "run from the folder that holds it, install it, or put it beside the YAML file"
            raise PluginError(f"{key}: no module {error.name!r} for {path!r}: {hint}") from error
        raise PluginError(f"{key}: {module_name} can't be imported: {error}") from error
    except Exception as error:
        raise PluginError(f"{key}: {module_name} can't be imported: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise PluginError(f"{key}: module {module_name} has no {name!r}") from None


def load_class(path: str, base: type[T], *, key: str, kwargs: dict[str, Any]) -> type[T]:
    """The subclass of `base` that a path names, checked to accept `kwargs` in its constructor.

    Raises:
        PluginError: see `load_object`; also if it is no such class or its constructor does not take `kwargs`.
    """
    cls = load_object(path, key=key)
    if not inspect.isclass(cls) or not issubclass(cls, base):
        raise PluginError(f"{key}: {path!r} must be a subclass of {base.__name__}")
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        fix = "set env.cls" if "'env'" in str(error) else f"see {key.partition('.')[0]}.args"
        raise PluginError(
            f"{key}: {path} can't be built with ({', '.join(kwargs) or 'no arguments'}): {error}: {fix}"
        ) from None
    return cls
