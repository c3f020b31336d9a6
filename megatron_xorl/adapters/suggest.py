"""What to say about a target entry that matches nothing.

The one idea: most such entries are one step away from a real one, so each known slip is undone (a misspelled component, a missing
beginning, a module for a projection, a regular expression for a pattern, a tensor's name for a projection's) and a repaired entry
is offered only if it takes something. Modules that nothing adapts, and names of other frameworks, get their reason instead.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator, Sequence

from megatron_xorl.adapters.matching import WHOLE_BANK, is_pattern
from megatron_xorl.adapters.projections import Projection
from megatron_xorl.errors import nearest

__all__ = ["NEVER_ADAPTED", "why_nothing"]

NEVER_ADAPTED: dict[str, str] = {
    "router": "the router never trains",
    "indexer": "the indexer is not adapted (see the key indexer)",
    "embedding": "the embedding is not adapted",
    "norms": "norms are not adapted",
    "mtp": "the multi-token-prediction layer is kept, not adapted",
}
"""Parts of the model that no target entry can name, and what is said of them."""

_NEVER = {
    "gate": "router",
    "e_score_correction_bias": "router",
    "indexer": "indexer",
    "wq_b": "indexer",
    "wk": "indexer",
    "weights_proj": "indexer",
    "embed_tokens": "embedding",
    "input_layernorm": "norms",
    "post_attention_layernorm": "norms",
    "q_a_layernorm": "norms",
    "kv_a_layernorm": "norms",
    "norm": "norms",
    "eh_proj": "mtp",
    "enorm": "mtp",
    "hnorm": "mtp",
    "shared_head": "mtp",
}
_QKV = "q_a_proj, q_b_proj, kv_a_proj_with_mqa and kv_b_proj"
_KV = "kv_a_proj_with_mqa and kv_b_proj"
_ELSEWHERE = {
    # Qwen, Llama
    "q_proj": "q_a_proj and q_b_proj",
    "k_proj": _KV,
    "v_proj": _KV,
    "kv_proj": _KV,
    "qkv_proj": _QKV,
    "gate_up_proj": "gate_proj and up_proj",
    # Mixtral, and the keys of experts in adapter files
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    # Megatron
    "linear_fc1": "gate_proj and up_proj",
    "linear_fc2": "down_proj",
    "linear_qkv": _QKV,
    "linear_proj": "o_proj",
    "linear_q_proj": "q_a_proj and q_b_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
    "output_layer": "lm_head",
}
_EVERYTHING = ("all", "all-linear", "all_linear")
_DECORATION = re.compile(r"^base_model\.model\.|(\.lora_[AB])?(\.default)?(\.weight)?$")
_REGEX = re.compile(r"[\\^$()|+{}]|^\.\*")


def why_nothing(pattern: str, projections: Sequence[Projection]) -> str:
    """Return the end of the sentence "target 'x' matches nothing": the reason if known, and the nearest real names."""
    if pattern.strip().lower() in _EVERYTHING:
        return "; leave lora_target_modules out to adapt every projection, or write '*'"
    if _REGEX.search(pattern):
        return _not_regex(pattern, projections)
    several = [word for word in re.split(r"[,;\s]+", pattern) if word]
    if several[1:]:
        return f": an entry is one name or one pattern; write one list entry for each: {', '.join(map(repr, several))}"
    plain = _DECORATION.sub("", pattern.strip())
    parts = plain.split(".")
    return (
        _foreign(parts, projections)
        or _layers_note(plain, parts, projections)
        or _experts_note(parts, projections)
        or _repaired(plain, projections)
        or _kind_note(plain, parts, projections)
        or _nearest_names(plain, projections)
    )


def _foreign(parts: Sequence[str], projections: Sequence[Projection]) -> str:
    for part in reversed(parts):
        core = part.strip("*?").lower()
        if core in _NEVER:
            leaves = list(dict.fromkeys(item.leaf for item in projections))
            close = nearest(core, leaves, n=1)
            names = (
                f"the nearest projection is {close[0]}"
                if close
                else f"projections are {', '.join(leaves)}"
            )
            return f": {NEVER_ADAPTED[_NEVER[core]]}; remove it; {names}"
        if core in _ELSEWHERE:
            return f": names here are Hugging Face's, one projection each; write {_ELSEWHERE[core]}"
    return ""


def _layers_note(plain: str, parts: Sequence[str], projections: Sequence[Projection]) -> str:
    """Say which layers there are, if the entry names none of them."""
    count = 1 + max((item.layer for item in projections if item.layer is not None), default=-1)
    for before, part in itertools.pairwise(parts):
        if before != "layers" or "*" in part or not re.search(r"\d", part):
            continue
        if not any(fnmatch.fnmatchcase(str(layer), part) for layer in range(count)):
            last = ".".join(str(count - 1) if item == part else item for item in parts)
            near = next((f"; did you mean {entry!r}?" for entry in _whole(last, projections)), "")
            return (
                f"; the layers are 0 to {count - 1} (a multi-token-prediction layer after them is kept, not adapted)"
                f"{near or _nearest_names(plain, projections)}"
            )
    return ""


def _kind_note(plain: str, parts: Sequence[str], projections: Sequence[Projection]) -> str:
    """Say what a layer has, if only others have what the entry names: the first layers are dense, the rest have experts."""
    for before, part in itertools.pairwise(parts):
        if before == "layers" and part.isdecimal():
            names = [item.name for item in projections if item.layer == int(part)]
            everywhere = ".".join("*" if item == part else item for item in parts)
            if any(True for _ in _whole(everywhere, projections)):
                close = ", ".join(nearest(plain, names) or names)
                return (
                    f"; layer {int(part)} has none, only other layers have; its nearest are {close}"
                )
    return ""


def _experts_note(parts: Sequence[str], projections: Sequence[Projection]) -> str:
    """Say that experts are not named one by one, if the entry would match without their number."""
    for index, (before, part) in enumerate(itertools.pairwise(parts)):
        if before == "experts" and re.search(r"\d", part):
            rest = parts[index + 2 :]
            entry = ".".join([*parts[: index + 1], "*", *([] if rest == ["*"] else rest)])
            for whole in _whole(entry, projections):
                number = max(item.num_experts for item in projections)
                return f": {WHOLE_BANK}; the experts are 0 to {number - 1}; did you mean {whole!r}?"
    return ""


def _not_regex(pattern: str, projections: Sequence[Projection]) -> str:
    said = ": an entry is a name or an fnmatch pattern (* ? [ ]), not a regular expression"
    text = re.sub(r"\((?:\?:)?([^()|]*)\|[^()]*\)", r"\1", pattern.strip().strip("^$"))
    text = re.sub(r"\{([^{},]*),[^{}]*\}", r"\1", text).partition("|")[0].strip("()^$")
    text = re.sub(r"(?<!\\)\.[*+]\??", "*", text)
    text = re.sub(r"(\\d|\[0-9\])[+*]?", "*", text).replace("\\", "")
    each = "one entry for each alternative, for example " if re.search(r"[|{]", pattern) else ""
    for entry in _whole(text, projections):
        return f"{said}; write {each}{entry!r}"
    return f"{said}{_nearest_names(text, projections)}"


def _repaired(plain: str, projections: Sequence[Projection]) -> str:
    """Offer the entry with what is missing added, or else with each unknown component replaced by the nearest known one."""
    known = sorted(
        {part for item in projections for part in item.name.split(".") if not part.isdecimal()}
    )
    near = ".".join(_nearest_part(part, known) for part in plain.split("."))
    for entry in itertools.chain(_whole(plain, projections), _whole(near, projections)):
        module = entry.endswith(f"{plain}.*")
        return (
            f"{': it names a module, not a projection' if module else ''}; did you mean {entry!r}?"
        )
    return ""


def _whole(entry: str, projections: Sequence[Projection]) -> Iterator[str]:
    """Yield ``entry`` and its completions, those that take something."""
    inside = () if entry.endswith("*") else (f"{entry}.*", f"*.{entry}.*")
    for whole in (entry, *inside, f"model.{entry}", f"*.{entry}"):
        if _takes(whole, projections):
            yield whole


def _takes(entry: str, projections: Sequence[Projection]) -> bool:
    if not is_pattern(entry):
        return any(item.leaf == entry for item in projections)
    matches = re.compile(fnmatch.translate(entry)).match
    return any(matches(name) for item in projections for name in _names(item))


def _names(item: Projection) -> tuple[str, ...]:
    return (item.name, item.expert_name(0)) if item.num_experts else (item.name,)


def _nearest_part(part: str, known: Sequence[str]) -> str:
    if part in known or part.isdecimal():
        return part
    core = part.strip("*")
    if any(mark in core for mark in "*?[") or not core:
        return part
    if core != part and any(fnmatch.fnmatchcase(name, part) for name in known):
        return part
    by_case = {name.lower(): name for name in known}
    longer = [name for name in known if name.startswith(core.lower())]
    best = [by_case[core.lower()]] if core.lower() in by_case else []
    best = best or (longer if len(longer) == 1 else nearest(core, known, n=1))
    if not best:
        return part
    return part.replace(core, best[0]) if core != part else best[0]


def _nearest_names(plain: str, projections: Sequence[Projection]) -> str:
    leaves = list(dict.fromkeys(item.leaf for item in projections))
    close = nearest(plain, [*leaves, *(item.name for item in projections)])
    return (
        f"; the nearest names are {', '.join(dict.fromkeys(close))}"
        if close
        else f"; projections are {', '.join(leaves)}"
    )
