"""No code of a checkpoint runs, and nobody is asked whether it may."""

import ast
import builtins
import json
import re
from pathlib import Path

import pytest
from damaged import save
from tiny_bert import save_bert
import ssmscope
from ssmscope.attacks.resources import Encoder, MaskedLM
from ssmscope.errors import InputError

CODE = """
from pathlib import Path
Path({witness!r}).write_text("run")
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast
class Config(MambaConfig): pass
class LM(MambaForCausalLM): pass
class Tokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Record the questions asked; the answer is always yes."""
    questions: list[str] = []

    def ask(question: str = "") -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr(builtins, "input", ask)
    return questions


def with_code(path: Path, file: str, auto_map: dict[str, object], **more: object) -> Path:
    """The directory with code of its own, which a file's auto_map names; returns what the code writes."""
    witness = path / "witness"
    (path / "own.py").write_text(CODE.format(witness=str(witness)))
    fields = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**fields, "auto_map": auto_map, **more}))
    return witness


MODEL = {
    name: f"own.{kind}"
    for name, kind in (
        ("AutoConfig", "Config"), ("AutoModel", "LM"), ("AutoModelForCausalLM", "LM"),
        ("AutoModelForSequenceClassification", "LM"), ("AutoModelForMaskedLM", "LM"),
    )
}  # fmt: skip
TOKENIZER = {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "Tokenizer"])
def test_a_tokenizers_code(tmp_path, asked, capsys, tokenizer_class):
    """A tokenizer that transformers has itself is read; one that is code is refused."""
    path = save("classifier", tmp_path / "model")
    witness = with_code(path, "tokenizer_config.json", TOKENIZER, tokenizer_class=tokenizer_class)
    try:
        assert ssmscope.load(path).encode("a good film").input_ids.numel()
    except InputError as error:
        assert re.search("the tokenizer .* is code, which is never run: give another one", str(error))
    with pytest.raises(InputError, match="tokenizer"):
        other = save("mamba", tmp_path / "other")
        ssmscope.load(other, tokenizer=path if tokenizer_class == "Tokenizer" else tmp_path / "nowhere")
    assert not witness.exists() and asked == [] and capsys.readouterr().out == ""


@pytest.mark.parametrize("layout", ["mamba", "mamba2", "classifier"])
@pytest.mark.parametrize("architecture", [None, "MambaForCausalLM", "MambaForSequenceClassification", "own.LM"])
@pytest.mark.parametrize("kind", [None, "own"])
def test_a_models_code(tmp_path, asked, capsys, layout, architecture, kind):
    path = save(layout, tmp_path / "model")
    more = {"architectures": [architecture]} if architecture else {}
    witness = with_code(path, "config.json", MODEL, **more, **({"model_type": kind} if kind else {}))
    try:
        ssmscope.load(path)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert kind is None
    assert not witness.exists() and asked == [] and capsys.readouterr().out == ""


@pytest.mark.parametrize("reads", [Encoder, MaskedLM])
@pytest.mark.parametrize("kind", [None, "own"])
def test_the_code_of_what_attacks_use(tmp_path, asked, capsys, reads, kind):
    path = save_bert(tmp_path / "bert")
    more = {"model_type": kind} if kind else {}
    witness = with_code(path, "config.json", MODEL, **more)
    with_code(path, "tokenizer_config.json", TOKENIZER, tokenizer_class="Tokenizer")
    try:
        reads(path)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert kind is None  # transformers 5 has a tokenizer of its own for every BERT
    assert not witness.exists() and asked == [] and capsys.readouterr().out == ""


def test_every_auto_class_is_told_not_to_trust():
    """No call in the package leaves it to transformers to ask; peft and mamba_ssm read weights alone, settings are
    numbers."""
    without_code = ("peft.PeftModel.from_pretrained", "transformers.GenerationConfig.from_pretrained")
    without_code += ("kind.MambaLMHeadModel.from_pretrained",)
    silent, calls = [], 0
    for file in Path(ssmscope.__file__).parent.rglob("*.py"):
        code = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(code)) if "from_pretrained" in code else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "from_pretrained" and ast.unparse(node.func) not in without_code:
                calls += 1
                trust = [k.value for k in node.keywords if k.arg == "trust_remote_code"]
                if not (trust and isinstance(trust[0], ast.Constant) and trust[0].value is False):
                    silent.append(f"{file.name}:{node.lineno}")
    assert calls >= 3 and silent == []
