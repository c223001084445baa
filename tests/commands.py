"""Command lines: a random model that they name, and how every one of them is refused that must be."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

WORDS = "a good film with bad acting , but great music .".split()
TEXT = "a good film with bad acting , but great music ."
Answer = Callable[..., SimpleNamespace]


def saved_mamba(directory: Path) -> Path:
    """Save a random Mamba with a tokenizer of ten words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(directory)
    torch.manual_seed(0)
    sizes = dict(vocab_size=16, hidden_size=16, state_size=4, num_hidden_layers=3)
    MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0)).save_pretrained(directory)
    return directory


def without_tokenizer(mamba: Path, directory: Path) -> Path:
    """Save the same model without its tokenizer."""
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(mamba / name, directory)
    return directory


def refused(analyze: Answer, tmp_path: Path) -> Callable[..., str]:
    """Run a command line that must be refused, check the form of the refusal, and return its line."""

    def run(*arguments: object) -> str:
        out = tmp_path / "must-not-appear"
        before = sorted(tmp_path.rglob("*"))
        given = (
            arguments
            if "--out" in arguments or not {"heatmap", "attention", "explain", "fidelity"} & set(arguments)
            else (*arguments, "--out", out)
        )
        answer = analyze(*given)
        assert answer.code == 2 and answer.out == ""
        assert answer.err.startswith("analyze: ") and answer.err.count("\n") == 1 and answer.err.endswith("\n")
        assert sorted(tmp_path.rglob("*")) == before
        return answer.err.removeprefix("analyze: ").rstrip("\n")

    return run
