"""Chats are spelled out by the tokenizer's template, with one begin token."""

import copy
import json

import pytest
from refusals import refuses
from tokenizers.processors import TemplateProcessing
import ssmscope
from ssmscope.api.inputs import TEXTS, Texts
from ssmscope.core.chat import chat_ids, is_chat, read_chats

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHAT = [{"role": "user", "content": "Who sat by the fire?"}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "The old man"}]


@pytest.fixture(scope="module")
def model():
    found = ssmscope.load("demo/books-mamba2")
    tokenizer = copy.deepcopy(found.tokenizer)
    tokenizer.chat_template = TEMPLATE
    tokenizer.bos_token = tokenizer.eos_token
    begin = (tokenizer.bos_token, tokenizer.bos_token_id)  # The tokenizer adds it to every text, as Llama's does.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin[0]} $A", None, [begin])
    return ssmscope.load(found.module, tokenizer=tokenizer)


def test_a_chat_has_one_begin_token_and_begins_the_answer(model):
    begin = model.tokenizer.bos_token_id
    plain = "user: Who sat by the fire? assistant:"
    wanted = model.tokenizer(plain)["input_ids"]
    assert wanted[0] == begin
    assert chat_ids(model, CHAT) == [wanted]
    batch = model.encode([CHAT, ANSWERED])
    rows = [ids[real].tolist() for ids, real in zip(batch.input_ids, batch.mask)]
    assert rows[0] == wanted and [row.count(begin) for row in rows] == [1, 1]
    assert model.tokenizer.decode(rows[1][1:]).strip() == "user: Who sat by the fire? assistant: The old man"
    assert model.encode(CHAT).input_ids.tolist() == [wanted]


def test_analyses_read_chats_in_python_and_from_files(model, tmp_path):
    wanted = ssmscope.explain(model, CHAT, methods=["gradxinput"])[0]
    forms = {"a.json": CHAT, "b.json": [CHAT], "c.json": {"messages": CHAT}}
    for name, value in forms.items():
        (tmp_path / name).write_text(json.dumps(value))
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in (CHAT, ANSWERED)))
    for given in (CHAT, [CHAT], str(tmp_path / "a.json")):
        assert ssmscope.explain(model, chat=given, methods=["gradxinput"])[0].tokens == wanted.tokens
    for name in forms:
        assert read_chats(str(tmp_path / name)) == [CHAT]
    assert read_chats(str(tmp_path / "d.jsonl")) == [CHAT, ANSWERED]
    values = dict.fromkeys((*TEXTS, "max_tokens")) | {"chat": str(tmp_path / "d.jsonl")}
    Texts().check(values, {})
    batch = Texts().read(values, {}, [model])
    assert batch.tokens[0] == wanted.tokens and len(batch.tokens) == 2


def test_what_is_no_chat_is_refused(model, tmp_path):
    assert not any(map(is_chat, (["a"], "a", [5, 17], [("a", 1)], [{"text": "a", "label": 1}], [])))
    refuses("without a chat template", lambda: ssmscope.load("demo/books-mamba2").encode(CHAT))
    refuses("chat 0 holds something that is no message", model.encode, [*CHAT, {"role": "user"}])
    for content, says in (("[1, 2]", "holds no chat"), ("a b", "is not JSON")):
        (tmp_path / "wrong.json").write_text(content)
        refuses(says, read_chats, str(tmp_path / "wrong.json"))
