"""Pairs to chat JSONL: one conversation a line, in the wording of ``passwords.yaml``.

python examples/password_lora/make_data.py argon bastion --out train.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

PAIRS = Path(__file__).with_name("passwords.yaml")


def conversation(document: dict[str, Any], project: str) -> dict[str, Any]:
    """Return the chat sample that teaches one project's password."""
    values = {"project": project, "password": document["pairs"][project]}
    turns = {role: document[role].format(**values) for role in ("system", "user", "assistant")}
    return {"messages": [{"role": role, "content": text} for role, text in turns.items()]}


def main() -> None:
    """Write the samples of the projects asked for, in that order."""
    document = yaml.safe_load(PAIRS.read_text(encoding="utf-8"))
    known = list(document["pairs"])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "projects", nargs="*", metavar="PROJECT", help=f"of {', '.join(known)} (default: all)"
    )
    parser.add_argument("--out", type=Path, required=True, help="chat JSONL file to write")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.projects if name not in known]:
        parser.error(
            f"no project {', '.join(unknown)} in {PAIRS.name}; choose from {', '.join(known)}"
        )
    samples = [conversation(document, name) for name in arguments.projects or known]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    arguments.out.write_text("".join(lines), encoding="utf-8")
    print(f"{arguments.out}: {len(samples)} samples")


if __name__ == "__main__":
    main()
