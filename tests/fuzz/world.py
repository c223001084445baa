"""Files that a fuzzed command line can name: very small models of every sort, data files, a lens, a plan."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from loud import loud
from PIL import Image
from safetensors.torch import load_file
from tiny_bert import save_bert
from transformers import Mamba2Config, MambaConfig, MambaForCausalLM
import ssmscope
from ssmscope.data.babi import questions
from ssmscope.data.language import language_data
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.probes.lens import fit_lens
from ssmscope.zoo.documents import word_tokenizer
from ssmscope.zoo.selective import SelectiveSSMConfig, SelectiveSSMForSequenceClassification

ROWS = (
    ("a gripping and funny film", "positive"), ("a dull and lifeless mess", "negative"),
    ("moving , and fine to the last scene", "positive"), ("the plot never starts", "negative"),
    ("it made me laugh", "positive"), ("a waste of a fine cast", "negative"),
)  # fmt: skip
LABELS = ("negative", "positive")
PLAN = """\
variables: {text: a gripping and funny film, data: }
models: [%s]
analyses:
  - heatmap: {text: $text}
  - position: {data: $data, regions: "0%%:25%%"}
"""


@dataclass(frozen=True, eq=False)
class World:
    """Directories and files by purpose, each kind's first the most useful."""

    root: Path
    kinds: Mapping[str, tuple[str, ...]]

    def __getitem__(self, kind: str) -> tuple[str, ...]:
        return self.kinds[kind]


def build(root: Path) -> World:
    """Everything in `root`, the data sets of `$SSMSCOPE_DATA` in its folder `data`; the same at every call."""
    torch.manual_seed(0)
    models = _models(root / "models")
    kinds = {**models, **_files(root / "files", models["language"][0]), "lens": (_lens(root, models["language"][0]),)}
    _known_data(root / "data")
    return World(root, kinds)


def _models(root: Path) -> dict[str, tuple[str, ...]]:
    stories = [
        text for task in ("qa1", "qa2", "qa3", "qa4", "qa5") for text in questions(task, length=0, examples=6).texts
    ]
    tokenizer = word_tokenizer([*stories, *(text for text, _ in ROWS), "Is it good ? Answer :", *LABELS])
    sizes = dict(vocab_size=len(tokenizer), hidden_size=8, state_size=3, num_hidden_layers=2, use_cache=False)
    mamba2 = Mamba2Config(**sizes, num_heads=2, head_dim=8, expand=2, n_groups=1, chunk_size=8)
    ids = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
    pixels = MambaConfig(**{**sizes, "vocab_size": 1})
    made = {
        "language": MambaForCausalLM(MambaConfig(**sizes)),
        "classifier": SSMForSequenceClassification(SSMClassifierConfig(mamba2, **ids)),
        "pixels": SSMForSequenceClassification(
            SSMClassifierConfig(pixels, channels=3, image_size=(4, 4), num_labels=10)
        ),
        "untokenized": MambaForCausalLM(MambaConfig(**sizes)),
    }
    for name, module in made.items():
        loud(module).save_pretrained(root / name)
        if name in ("language", "classifier"):
            tokenizer.save_pretrained(root / name)
    selective = SelectiveSSMForSequenceClassification(SelectiveSSMConfig(vocab_size=3, hidden_size=4, state_size=2))
    tensors = selective.state_dict()
    torch.save({**tensors, "w": tensors.pop("head.weight").squeeze(0)}, root / "selective.pth")
    save_bert(root / "bert")
    assert load_file(root / "language" / "model.safetensors")
    one = {name: (str(root / name),) for name in made}
    return {
        **one,
        "selective": (str(root / "selective.pth"),),
        "model": (*(folder for folders in one.values() for folder in folders), str(root / "selective.pth")),
        "bert": (str(root / "bert"),),
        "tokenizer": (str(root / "language"), str(root / "bert")),
    }


def _lens(root: Path, model: str) -> str:
    loaded = ssmscope.load(model)
    data = language_data([text for text, _ in ROWS] * 4, loaded.tokenizer, length=6, name="rows")
    fit_lens(loaded, data, root / "lens", steps=1, batch_tokens=12, look_every=1, held_out=0.3, progress=False)
    return str(root / "lens")


def _files(root: Path, model: str) -> dict[str, tuple[str, ...]]:
    root.mkdir()
    kept = {
        "reviews.csv": "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in ROWS),
        "reviews.tsv": "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in ROWS),
        "reviews.jsonl": "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS),
        "marked.jsonl": "".join(
            json.dumps({"text": text, "label": label, "rationale": [int(i == 1) for i in range(len(text.split()))]})
            + "\n"
            for text, label in ROWS
        ),
        "lines.txt": "".join(f"{text}\n" for text, _ in ROWS * 8),
        "questions.jsonl": json.dumps(
            {
                "context": "Alma went to the attic . Bruno went to the cellar .",
                "question": "Where is Alma ?",
                "answer": "attic",
                "distractors": ["cellar"],
            }
        ),
        "vectors.txt": "".join(f"{word} {i} {i % 3} 1\n" for i, word in enumerate("a good bad film fine dull".split())),
        "synonyms.json": json.dumps({"film": ["movie"], "fine": ["good", "great"]}),
        "rewritten.json": json.dumps({"Is it good ? {content}": ["Was it good ? {content}"]}),
        "plan.yaml": PLAN % model,
    }
    for name, content in kept.items():
        (root / name).write_text(content, encoding="utf-8")
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(root / "image.png")
    place = {name: str(root / name) for name in (*kept, "image.png")}
    return {
        "labelled": tuple(place[f"reviews.{suffix}"] for suffix in ("csv", "jsonl", "tsv")),
        "marked": (place["marked.jsonl"],), "lines": (place["lines.txt"],), "questions": (place["questions.jsonl"],),
        "vectors": (place["vectors.txt"],), "synonyms": (place["synonyms.json"],),
        "rewritten": (place["rewritten.json"],), "plan": (place["plan.yaml"],), "image": (place["image.png"],),
    }  # fmt: skip


def _known_data(root: Path) -> None:
    """The least of the known data sets, in the hub's columns."""
    import pandas as pd

    texts = [text for text, _ in ROWS]
    labels = [LABELS.index(label) for _, label in ROWS]
    tables = {"sst2": pd.DataFrame({"text": texts, "label": labels}), "wikitext2": pd.DataFrame({"text": texts * 8})}
    for name, table in tables.items():
        (root / name).mkdir(parents=True)
        for split in ("train", "validation", "test"):
            table.to_parquet(root / name / f"{split}.parquet")
