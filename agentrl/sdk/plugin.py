"""Classes and functions named in a config by dotted path."""

from __future__ import annotations

import importlib
import inspect
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

P = TypeVar("P", bound="Plugin")


class PluginError(ValueError):
    """A dotted path that leads nowhere, or to the wrong kind of thing; names the key and the fix."""


def load_object(path: str, *, key: str, group: str = "") -> Any:
    """What `package.module:name` names, or an entry point that an installed package gives.

    Args:
        key: the config key the path stands under, for the message.
        group: the entry points' group, such as `agentrl.envs`; empty: only dotted paths.

    Raises:
        PluginError: no such module, name or entry point, or the module fails to import.
    """
    if group and ":" not in path:
        installed = {point.name: point.value for point in entry_points(group=group)}
        if path not in installed:
            near = get_close_matches(path, installed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            known = ", ".join(sorted(installed)) or "none"
            raise PluginError(
                f"{key}: {path!r} is neither of the form package.module:Name nor an entry point of {group}: "
                f"{hint}installed: {known}"
            )
        path = installed[path]
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


class Plugin(Protocol):
    """A class that is built with arguments from the config."""

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None: ...


def load_class(path: str, base: type[P], *, key: str, kwargs: dict[str, Any], group: str = "") -> type[P]:
    """The subclass of `base` that a path names, checked to accept `kwargs` in its constructor.

    Raises:
        PluginError: see `load_object`; also if it is no such class or its constructor does not take `kwargs`.
    """
    cls = load_object(path, key=key, group=group)
    if not inspect.isclass(cls) or not issubclass(cls, base):
        raise PluginError(f"{key}: {path!r} must be a subclass of {base.__name__}")
    section = key.rpartition(".")[0]
    arguments = "data.sampler_args" if section == "data" else f"{section}.args"
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        fix = f"set {section.replace('agent', 'env')}.cls" if "'env'" in str(error) else f"see {arguments}"
        raise PluginError(
            f"{key}: {path} can't be built with ({', '.join(kwargs) or 'no arguments'}): {error}: {fix}"
        ) from None
    try:
        cls.check_arguments(**kwargs)
    except PluginError:
        raise
    except Exception as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise PluginError(f"{key}: {path}: {what}: see {arguments}") from error
    return cls
