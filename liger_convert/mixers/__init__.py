"""The mixers. Adding one is a file in this folder, with `@register_mixer` on its class, and a line in registry.py."""

from liger_convert.config.names import SOFTMAX
from liger_convert.mixers.options import build_mixer, make_spec, resolve_spec
from liger_convert.mixers.registry import MIXERS, find_mixer, register_mixer

__all__ = ["MIXERS", "SOFTMAX", "build_mixer", "find_mixer", "make_spec", "register_mixer", "resolve_spec"]
