"""Helpers of the tests of plans: very small models in directories, and plans that run in this process."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from markupsafe import Markup
from ssmscope.api import analyses as registry
from ssmscope.api.inputs import Texts
from ssmscope.api.results import Result
from ssmscope.reports.jobs import Jobs, make_jobs
from ssmscope.reports.plan import Plan, read_plan
from ssmscope.reports.running import run_locally, run_plan
from ssmscope.reports.store import Report

WORDS = "a good film with bad acting , but great music .".split()
TEXT = "a good film with bad acting"
MINIMAL: dict[str, dict[str, Any]] = {
    **{
        name: {"text": "a film"}
        for name, each in registry.analyses().items()
        if isinstance(each.reads, Texts) and each.reads.needed
    },
    "circuit": {"data": "induction"},
    "effect": {"clean": "a good film", "corrupted": "a bad film"},
    "evaluate": {"tasks": ["wnli"]},
    "generate": {"text": "a film"},
    "knockout": {"text": "a film", "from": ["film"]},
    "parity": {"logits": "dumped.safetensors"},
    "patch": {"clean": "a good film", "corrupted": "a bad film"},
    "steer": {"text": "a film", "toward": ["a good film"], "away": ["a bad film"]},
}
"""Options without which a verb does not begin."""


def tiny_model(directory: Path, seed: int = 0) -> Path:
    """A random language model of one Mamba layer with a tokenizer of ten words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(directory)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = dict(vocab_size=16, hidden_size=8, state_size=4, num_hidden_layers=1)
        config = MambaConfig(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0)
        MambaForCausalLM(config).save_pretrained(directory)
    return directory


def unpainted(patch: pytest.MonkeyPatch) -> None:
    """Leave out the pictures of jobs, whose drawing takes longer than such jobs."""
    patch.setattr(Result, "_drawn", lambda self, suffix: b"a picture")
    patch.setattr("ssmscope.render.html.image_html", lambda picture: Markup('<img alt="" src="data:,">'))


def planned(document: Any, **options: Any) -> Plan:
    """The plan that a document describes; a text is taken as it is."""
    text = document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return read_plan(text, **options)


def jobs_of(document: Any, **options: Any) -> Jobs:
    return make_jobs(planned(document, **options))


def run(document: Any, root: Path, **options: Any) -> Report:
    """Run a plan in this process."""
    plan = planned(document)
    return run_plan(plan, make_jobs(plan), root, **{"engine": run_locally, **options})


def numbers(root: Path) -> dict[str, Any]:
    """Return the finished results in a report's directory by their place, without dates."""
    found = {}
    for path in sorted(root.glob("results/*/*.json")):
        document = json.loads(path.read_bytes())
        if path.name == "job.json":
            document = {key: document[key] for key in ("command", "verb", "models", "options", "state")}
        else:
            document["provenance"].pop("date")
        found[path.relative_to(root).as_posix()] = document
    return found


def tables(root: Path) -> dict[str, bytes]:
    """The bytes of the tables of all results."""
    paths = [root / "all.parquet", *sorted(path for path in (root / "tables").rglob("*") if path.is_file())]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
