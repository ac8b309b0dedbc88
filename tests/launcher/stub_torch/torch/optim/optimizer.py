from collections.abc import Callable
from typing import Any

_global_hooks: list[Callable[..., Any]] = []


def register_optimizer_step_pre_hook(hook: Callable[..., Any]) -> None:
    _global_hooks.append(hook)


def register_optimizer_step_post_hook(hook: Callable[..., Any]) -> None:
    _global_hooks.append(hook)
