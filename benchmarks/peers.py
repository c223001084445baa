"""Peers of waiting.py: each function gives the same answer as a user would get it without ssmscope."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

MAX_NUMBERS_AT_ONCE = 2**24


@torch.no_grad()
def forward(module: Any, ids: Tensor) -> Tensor:
    """The library's own forward pass: logits (batch, length, vocabulary)."""
    return module(ids, use_cache=False).logits


def captum_scores(module: Any, ids: Tensor, name: str, **options: Any) -> Tensor:
    """Scores (batch, length) for the predicted next token by a class of captum, on the library's own forward pass."""
    import captum.attr

    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()(ids).detach()

    def logits(embeddings: Tensor) -> Tensor:
        last = module.base_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state[:, -1]
        return head(last.to(head.weight.dtype))

    with torch.no_grad():
        target = int(logits(embeddings).argmax())

    def logit(embeddings: Tensor) -> Tensor:
        return logits(embeddings)[:, target]

    return getattr(captum.attr, name)(logit).attribute(embeddings.requires_grad_(), **options).sum(-1).detach()


@torch.no_grad()
def attention_pairs(r: Any) -> Tensor:
    """The mean over channels of α[t, s] = c_tᵀ exp(A Σ_{s<r≤t} Δ_r) b_s Δ_s (length, length), all pairs made.

    Of Mamba-2, whose heads have one decay, as the published 1-semiseparable product L ∘ (C Bᵀ) (Dao & Gu 2024).
    """
    _, length, heads, _, state = r.shape
    delta, A, b, c = r.delta[0].float(), r.A.float(), r.b[0].float(), r.c[0].float()
    sums = delta.cumsum(0)
    if r.A.shape[-1] == 1:
        decays = ((sums[:, None] - sums) * A[:, 0]).exp() * delta
        products = torch.einsum("tgn,sgn->tsg", c, b).repeat_interleave(heads // b.shape[1], -1)
        return (decays * products).mean(-1).tril()
    out = b.new_zeros(length, length)
    step = max(1, MAX_NUMBERS_AT_ONCE // (heads * state))
    for t in range(length):
        for first in range(0, t + 1, step):
            s = slice(first, min(first + step, t + 1))
            decays = ((sums[t] - sums[s])[..., None] * A).exp_()
            out[t, s] = torch.einsum("shn,n,sn,sh->s", decays, c[t, 0], b[s, 0], delta[s]) / heads
    return out


def fidelity_text_by_text(model: Any, texts: Sequence[str], rankings: int, levels: int = 21) -> float:
    """The mean ΔA of rankings, one text at a time: gradient × input by captum, the others at random.

    A ranking's `levels` copies of a text with ever more tokens replaced are one batch, from either end.
    """
    from captum.attr import InputXGradient

    module, areas = model.module, []
    fill = module.get_input_embeddings().weight.detach().mean(0)
    for number, text in enumerate(texts):
        ids = model.encode([text]).input_ids
        embeddings = module.get_input_embeddings()(ids).detach()
        length, target = ids.shape[1], int(forward_embeddings(module, embeddings).argmax())
        explained = InputXGradient(lambda e: module(inputs_embeds=e).logits)
        scores = [explained.attribute(embeddings.clone().requires_grad_(), target=target).sum(-1)[0].detach()]
        draw = torch.Generator().manual_seed(number)
        scores += [torch.rand(length, generator=draw) for _ in range(rankings - 1)]
        hidden = torch.linspace(0, length, levels).round()[:, None]
        for each in scores:
            for order, sign in ((each.argsort(descending=True), -1), (each.argsort(), 1)):
                copies = torch.where((order.argsort() < hidden)[..., None], fill, embeddings)
                share = forward_embeddings(module, copies).softmax(-1)[:, target]
                areas.append(sign * torch.trapezoid(share, dx=1 / (levels - 1)).item())
    return 2 * sum(areas) / len(areas)


@torch.no_grad()
def forward_embeddings(module: Any, embeddings: Tensor) -> Tensor:
    return module(inputs_embeds=embeddings).logits


class OneByOne:
    """PromptBench's way to evaluate a prompt: every example is a forward pass of its own."""

    def __init__(self, model: Any, data: Any, words: Sequence[str]):
        from ssmscope.data.prompts import CONTENT, content_of
        from ssmscope.evaluation import label_words

        self.model, self.data, self.words = model, data, words
        self.label_words, self.content, self.content_of = label_words, CONTENT, content_of

    def __call__(self, prompt: str, dataset: Any, model: Any) -> float:
        prompt = prompt.rstrip()  # the space after a suffix belongs to the answer
        after = prompt[prompt.find(self.content) :]
        answers = [found[0] for found in self.label_words(self.model, self.words, after=after).ids]
        right = 0
        for text, label in zip(self.data.texts, self.data.labels):
            filled = prompt.replace(self.content, self.content_of(self.data.name, text))
            ids = self.model.tokenizer(filled, return_tensors="pt")["input_ids"]
            right += int(forward(self.model.module, ids)[0, -1, answers].argmax()) == label
        return right / len(self.data)


def promptbench(attack: str, prompt: str, evaluate: OneByOne) -> None:
    """PromptBench's own attack. Its classes and the placeholder stay as they are."""
    from promptbench.prompt_attack import Attack
    from ssmscope.attacks.prompts.search import drawn_from

    # TextAttack takes the quotes around a word for a part of it, and PromptBench attacks the placeholder unless told
    kept = [*evaluate.words, *(f"{word}'" for word in evaluate.words), "content"]
    with _stopwords(), contextlib.redirect_stdout(io.StringIO()), drawn_from(0, prompt, attack):
        Attack(None, attack, None, prompt, evaluate, kept, verbose=False).attack()


@contextlib.contextmanager
def _stopwords() -> Iterator[None]:
    """NLTK's stop words, which PromptBench asks for, in a folder of NLTK's layout: its own may be out of reach."""
    import nltk
    from ssmscope.attacks.offline import stopwords

    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpora", "stopwords")
        corpus.mkdir(parents=True)
        (corpus / "english").write_text("\n".join(sorted(stopwords()[0])))
        nltk.data.path.insert(0, folder)
        yield
        nltk.data.path.remove(folder)


def training_step(module: Any, inputs: dict[str, Tensor], labels: Tensor, optimizer: Any = None) -> None:
    """The cross-entropy's gradient by every weight, through whatever runs the module's mixers, and a step along it."""
    cross_entropy(module(**inputs).logits.float().flatten(0, -2), labels.flatten()).backward()
    if optimizer is not None:
        optimizer.step()
    module.zero_grad(set_to_none=True)
