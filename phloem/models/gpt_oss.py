"""gpt-oss: attention sinks, windows on every other layer, YaRN.

Only its attention is here. Its experts are not: a dense MLP under the usual names stands in for
them (`num_local_experts: 0`), which no published checkpoint has.
"""

from __future__ import annotations

from phloem.models.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(architecture="gpt_oss")
