"""Ends of answers, and continuations of every text from its own state, with each next token written down."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ssmscope.core import token_runs
from ssmscope.core.model import Run
from ssmscope.core.trace import LayerState
from ssmscope.evaluation import running
from ssmscope.evaluation.forking import Rows, as_bytes
from ssmscope.evaluation.running import Answers
from ssmscope.zoo.documents import byte_tokenizer

SCRIPTS = ["good film", "\n\n bad\nnever said", " \n \nso", "", "no\n", "and on and on"]
END = 200


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Each step's number of rows; the model says the next letter of the script whose number, and how far it has come,
    are its state."""
    rows: list[int] = []

    def run_batch(model, ids, mask):
        """Whole rows: their first token is the script's number."""
        assert mask.shape == ids.shape
        rows.append(len(ids))
        return Run(logits_of(torch.from_numpy(ids[:, 0]), torch.from_numpy(mask.sum(1) - 1)), ())

    def run_token(model, ids, states):
        script, at = states[0].ssm[0][:, 0], states[0].ssm[0][:, 1] + 1
        for which, place, token in zip(script.tolist(), at.tolist(), ids.tolist()):
            assert next_byte(which, place - 1) == token  # every row goes on from what it has said itself
        rows.append(len(ids))
        return logits_of(script, at), (LayerState(None, (torch.stack([script, at], 1),)),)

    monkeypatch.setattr(running, "run_batch", run_batch)
    monkeypatch.setattr(token_runs.TokenRuns, "_enter", lambda runs, edits: None)
    monkeypatch.setattr(token_runs.TokenRuns, "_run", run_token)
    return rows


def next_byte(script: int, at: int) -> int:
    said = SCRIPTS[script].encode()
    return said[at] if at < len(said) else END


def logits_of(script: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    logits = torch.zeros(len(script), 256)
    for row, (which, place) in enumerate(zip(script.tolist(), at.tolist())):
        logits[row, next_byte(which, place)] = 1
    return logits


@pytest.mark.parametrize("from_states", [True, False])
@pytest.mark.parametrize("new_tokens", [1, 4, 30])
def test_answers_end_where_they_should(steps, from_states, new_tokens):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(END)})
    assert tokenizer.eos_token_id == END
    module, config, device = SimpleNamespace(), SimpleNamespace(), torch.device("cpu")
    model = SimpleNamespace(num_layers=1, tokenizer=tokenizer, module=module, config=config, device=device)
    speaker = Answers(model, new_tokens)
    chosen = np.array([5, 0, 3, 1, 2, 4])
    rows = Rows.of(as_bytes([[number] for number in range(6)]))
    start = torch.zeros(6, dtype=torch.long)
    states = (LayerState(None, (torch.stack([torch.from_numpy(chosen), start], 1),)),) if from_states else ()
    found = speaker.after(rows, chosen, logits_of(torch.from_numpy(chosen), start), states)
    expected = {
        1: ["a", "g", "", "", "", "n"],
        4: ["and ", "good", "", "b", "", "no"],
        30: ["and on and on", "good film", "", "bad", "so", "no"],
    }
    assert found == expected[new_tokens]
    lengths = [min(length, new_tokens) for length in (10, 7, 7, 1, 3, 14)]  # "…film" and the end; "…bad", line break; …
    assert steps == [sum(length > step for length in lengths) for step in range(1, max(lengths))]
