"""HotFlip (Ebrahimi et al. 2018): words replaced where the model's gradient predicts the largest loss.

To first order, replacing the word w at some place by w′ changes the loss by (e_w′ − e_w)ᵀ ∇L, with the gradient at the
place's embedding (their Eq. 4, with embeddings for one-hot characters). One backward pass through the recurrence ranks
all words at all places; the model evaluates only the best flips. The attack is white-box and does not preserve meaning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from ssmscope.attacks.names import CANDIDATES
from ssmscope.attacks.words.result import WORD
from ssmscope.core.batching import by_length
from ssmscope.core.model import Model
from ssmscope.core.ties import descending
from ssmscope.core.tokenizing import is_within_word, tokenize
from ssmscope.core.weights import weights_constant
from ssmscope.errors import InputError
from ssmscope.evaluation import Template
from ssmscope.evaluation.forking import token_rows
from ssmscope.interp.objective import tokens_that_fit

OVERSAMPLING = 3
"""Ratio of drawn to needed flips, because some are tokenized differently within the text."""
Scores = Callable[[Sequence[str]], Float[np.ndarray, "texts classes"]]


@dataclass(frozen=True)
class Limits:
    """Limits of the search, as in `word_attack`; words that are not replaced or not inserted, in lower case."""

    beam: int = 1
    flips: int | None = None
    candidates: int = CANDIDATES
    budget: int | None = None
    kept: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()

    def described(self, whose: str) -> tuple[str, ...]:
        """Describe the parts of the search that run, with the source of the stop words."""
        return (
            f"the {self.candidates} best flips by the gradient",
            "words of one token for others",
            *([f"no stop word ({whose})"] if whose else []),
            "greedy" if self.beam == 1 else f"a beam of {self.beam}",
            *([f"at most {self.flips} word{'s' if self.flips > 1 else ''}"] if self.flips is not None else []),
        )


def hotflip(
    model: Model,
    texts: Sequence[str],
    labels: Sequence[int],
    scores: Scores,
    *,
    template: Template,
    label_ids: Sequence[Sequence[int]] | None = None,
    limits: Limits = Limits(),
    ended: Callable[[int], None] | None = None,
) -> list[Search]:
    """Attack correctly classified texts together: gradients and scores (`scores` returns those of texts within the
    template) are computed in common batches. Each step replaces one more word, no place twice, and continues from the
    `beam` candidates of the highest loss −log p(true), even if it is lower than before, because the first-order
    estimate is not exact. A search ends with the text that changes the answer, or at a limit with the text of the
    highest loss. Replaced and inserted words consist of letters and are one token, and the rest of the text must keep
    its tokens. `label_ids` are tokens of a language model's word for each class; `ended` receives the number of
    searches that a step ended."""
    if not model.tokenizer.is_fast:
        raise InputError(f"hotflip needs the offsets of tokens; {model.name} has a slow tokenizer: give a fast one")
    vocabulary = Vocabulary.of(model, limits.absent)
    clean = [read(model, text, template, limits.kept) for text in texts]
    searches = [Search(label, node, [node]) for label, node in zip(labels, clean)]
    for search, row in zip(searches, scores(texts)):
        search.best.judge(row, search.label)
    while going := [search for search in searches if not search.over]:
        nodes = [node for search in going for node in search.beam]
        true = [search.label for search in going for _ in search.beam]
        gradients = loss_gradients(model, [node.ids for node in nodes], true, label_ids)
        found = iter(offers(model, nodes, gradients, vocabulary, template, limits.candidates))
        offered = [[node for _ in search.beam for node in next(found)] for search in going]
        reached = [search.chosen(nodes, limits) for search, nodes in zip(going, offered)]
        asked = [node.text for nodes in reached for node in nodes]
        rows = iter(scores(asked) if asked else ())
        for search, nodes in zip(going, reached):
            for node in nodes:
                node.judge(next(rows), search.label)
            search.settle(nodes, limits)
        if ended is not None:
            ended(sum(search.over for search in going))
    return searches


@dataclass(eq=False)
class Node:
    """A text (the template's content) within a search, and the tokens of the filled template. `places` maps tokens to
    (start, stop) in `text` of the words that may be replaced; `estimate` is the loss that the last flip added, to first
    order; `loss` is −log p(true)."""

    text: str
    ids: tuple[int, ...]
    places: Mapping[int, tuple[int, int]]
    estimate: float = 0.0
    scores: np.ndarray = field(default_factory=lambda: np.empty(0))
    loss: float = -np.inf

    def judge(self, scores: Float[np.ndarray, " classes"], label: int) -> None:
        self.scores, self.loss = scores, float(np.logaddexp.reduce(scores) - scores[label])

    def flipped(self, token: int, id: int, word: str, estimate: float) -> Node:
        """Return the node with another word in the place of a token."""
        start, stop = self.places[token]
        moved = len(word) - (stop - start)
        places = {
            at: (begin + moved, end + moved) if begin > start else (begin, end)
            for at, (begin, end) in self.places.items()
            if at != token
        }
        ids = (*self.ids[:token], id, *self.ids[token + 1 :])
        return Node(self.text[:start] + word + self.text[stop:], ids, places, estimate)


@dataclass(eq=False)
class Search:
    """Search for one example; `best` is the text that it ends with."""

    label: int
    best: Node
    beam: list[Node]
    queries: int = 1
    gradients: int = 0
    depth: int = 0
    over: bool = False

    def chosen(self, offered: Sequence[Node], limits: Limits) -> list[Node]:
        """Choose the candidates that the model evaluates: each text once, the best estimates first."""
        distinct: dict[str, Node] = {}
        for at in descending(np.array([node.estimate for node in offered])):
            distinct.setdefault(offered[at].text, offered[at])
        left = None if limits.budget is None else limits.budget - self.queries
        found = list(distinct.values())[:left]
        self.queries += len(found)
        return found

    def settle(self, reached: Sequence[Node], limits: Limits) -> None:
        """Keep the best of the evaluated candidates."""
        self.depth += 1
        self.gradients += len(self.beam)
        ranked = [reached[at] for at in descending(np.array([node.loss for node in reached]))]
        won = [node for node in ranked if node.scores.argmax() != self.label]
        if won or (ranked and ranked[0].loss > self.best.loss):
            self.best = (won or ranked)[0]
        self.beam = [node for node in ranked[: limits.beam] if node.places]
        spent = self.depth == limits.flips or self.queries == limits.budget
        self.over = bool(won) or spent or not self.beam


@dataclass(frozen=True)
class Vocabulary:
    """Tokens that may be inserted, their words and embeddings, by the mark before their letters. "Ġ" or "▁" often marks
    the token of a word after a space; without it a token continues a word."""

    ids: Mapping[str, tuple[int, ...]]
    words: Mapping[str, tuple[str, ...]]
    embeddings: Mapping[str, Float[Tensor, "tokens width"]]

    @classmethod
    def of(cls, model: Model, absent: Iterable[str] = ()) -> Vocabulary:
        """Collect the model's tokens of letters only, without special ones and `absent` words."""
        avoided, special = set(absent), set(model.tokenizer.all_special_ids)
        found: dict[str, list[tuple[int, str]]] = {}
        for token, number in model.tokenizer.get_vocab().items():
            word = letters(model, number)
            if not word or not token.endswith(word) or word.lower() in avoided:
                continue
            if number < model.vocabulary and number not in special:
                found.setdefault(token.removesuffix(word), []).append((number, word))
        ids = {mark: tuple(number for number, _ in sorted(pairs)) for mark, pairs in found.items()}
        words = {mark: tuple(word for _, word in sorted(pairs)) for mark, pairs in found.items()}
        return cls(ids, words, {mark: embedded(model, each) for mark, each in ids.items()})


def embedded(model: Model, ids: Sequence[int]) -> Float[Tensor, "tokens width"]:
    """Return the embeddings of tokens, without gradients."""
    with torch.no_grad():
        return model.module.get_input_embeddings()(torch.tensor(ids, device=model.device))


def letters(model: Model, number: int) -> str:
    """Return the word of a token, or "" if it does not consist of letters."""
    word = model.tokenizer.decode([number], clean_up_tokenization_spaces=False).strip()
    return word if word.isalpha() else ""


def read(model: Model, text: str, template: Template, kept: frozenset[str] = frozenset()) -> Node:
    """Read a text and find the words that may be replaced: those of letters and one token, not `kept`."""
    filled, before = template.fill(text), len(template.before)
    (ids,) = token_rows(model, [filled])
    offsets = tokenize(model.tokenizer, filled, return_offsets_mapping=True)["offset_mapping"]
    shared = Counter(place for start, stop in offsets for place in range(start, stop))
    words = {match.span(): match[0] for match in WORD.finditer(text)}
    special, places = set(model.tokenizer.all_special_ids), {}
    for token, (start, stop) in enumerate(offsets[: len(ids)]):
        start += len(filled[start:stop]) - len(filled[start:stop].lstrip())
        place = start - before, stop - before
        word = words.get(place, "")
        # The unknown token is special, several tokens may make up one character, and a combining mark ends no word.
        excluded = ids[token] in special or shared[start] > 1 or any(is_within_word(text, end) for end in place)
        if not excluded and word.isalpha() and word.lower() not in kept:
            places[token] = place
    return Node(text, tuple(ids), places)


def offers(
    model: Model,
    nodes: Sequence[Node],
    gradients: Sequence[Float[Tensor, "length width"]],
    vocabulary: Vocabulary,
    template: Template,
    number: int,
) -> list[list[Node]]:
    """Return every text's `number` best flips to first order, of those that are tokenized as intended."""
    drawn = [best_flips(model, node, each, vocabulary, OVERSAMPLING * number) for node, each in zip(nodes, gradients)]
    flat = [template.fill(flip.text) for flips in drawn for flip in flips]
    rows = iter(token_rows(model, flat))
    return [[flip for flip in flips if tuple(next(rows)) == flip.ids][:number] for flips in drawn]


def best_flips(
    model: Model, node: Node, gradient: Float[Tensor, "length width"], vocabulary: Vocabulary, number: int
) -> list[Node]:
    """Return the text after each of the `number` flips that add most to the loss, to first order."""
    names = model.tokenizer.convert_ids_to_tokens(list(node.ids))
    by_mark: dict[str, list[int]] = {}
    for token in node.places:
        by_mark.setdefault(names[token].removesuffix(letters(model, node.ids[token])), []).append(token)
    found: list[Node] = []
    for mark, tokens in by_mark.items():
        if mark not in vocabulary.ids:
            continue
        ids, words = vocabulary.ids[mark], vocabulary.words[mark]
        old = embedded(model, [node.ids[token] for token in tokens])
        added = estimates(gradient[tokens], old, vocabulary.embeddings[mark])
        flat = added.flatten().cpu().numpy()
        for at in descending(flat)[:number].tolist():
            estimate, (place, which) = float(flat[at]), divmod(at, len(ids))
            if ids[which] != node.ids[tokens[place]]:
                found.append(node.flipped(tokens[place], ids[which], words[which], estimate))
    return [found[at] for at in descending(np.array([flip.estimate for flip in found]))[:number]]


def estimates(
    gradient: Float[Tensor, "places width"], old: Float[Tensor, "places width"], new: Float[Tensor, "tokens width"]
) -> Float[Tensor, "places tokens"]:
    """Compute (e_new − e_old)ᵀ ∇L at every place: what a replacement adds to the loss, to first order."""
    return gradient @ new.T - (gradient * old).sum(-1, keepdim=True)


def loss_gradients(
    model: Model, rows: Sequence[Sequence[int]], labels: Sequence[int], label_ids: Sequence[Sequence[int]] | None
) -> list[Float[Tensor, "length width"]]:
    """Compute ∂(−log p(true))/∂embeddings of every row of token ids, in batches of similar length."""
    found: dict[int, Tensor] = {}
    longer = max(map(len, label_ids)) - 1 if label_ids is not None else 0
    most = tokens_that_fit(model, gradients=True, every_position=longer > 0)
    for chosen in by_length([len(row) + longer for row in rows], most):
        ids = pad_sequence([torch.tensor(rows[row]) for row in chosen], batch_first=True).to(model.device)
        lengths = torch.tensor([len(rows[row]) for row in chosen], device=model.device)
        mask = torch.arange(ids.shape[1], device=model.device) < lengths.unsqueeze(1)
        with torch.no_grad():
            embeddings = model.module.get_input_embeddings()(ids)
        with weights_constant(model.module), torch.enable_grad():
            inputs = embeddings.detach().requires_grad_()
            scores = class_scores(model, inputs, mask, label_ids)
            true = torch.tensor([labels[row] for row in chosen], device=model.device)
            loss = torch.nn.functional.cross_entropy(scores, true, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, inputs)
        for row, own in zip(chosen, gradient):
            found[row] = own[: len(rows[row])]
    return [found[row] for row in range(len(rows))]


def class_scores(
    model: Model, embeddings: Tensor, mask: Tensor, label_ids: Sequence[Sequence[int]] | None
) -> Float[Tensor, "rows classes"]:
    """Compute a classifier's logits, or Σ_j log P(token_j | text, earlier tokens) of class words, with gradients."""
    if label_ids is None or max(map(len, label_ids)) == 1:
        with model.running(mask=mask):
            logits = _precise(model.forward_embeddings(embeddings, mask))
        return logits if label_ids is None else logits.log_softmax(-1)[:, [ids[0] for ids in label_ids]]
    return torch.stack([_continuation(model, embeddings, mask, ids) for ids in label_ids], dim=1)


def _continuation(
    model: Model, embeddings: Tensor, mask: Bool[Tensor, "rows length"], ids: Sequence[int]
) -> Float[Tensor, " rows"]:
    """Compute log P of a continuation after every row."""
    lengths = mask.sum(1)
    table = model.module.get_input_embeddings()
    follow = table(torch.tensor(ids[:-1], dtype=torch.long, device=embeddings.device)).to(embeddings)
    rows = pad_sequence([torch.cat([row[:n], follow]) for row, n in zip(embeddings, lengths)], batch_first=True)
    longer = torch.arange(rows.shape[1], device=rows.device) < (lengths + len(follow)).unsqueeze(1)
    with model.running(mask=longer):
        logits = model.forward_embeddings(rows, longer, last_only=False)
    at = lengths.unsqueeze(1) - 1 + torch.arange(len(ids), device=rows.device)
    after = _precise(logits[torch.arange(len(rows), device=rows.device).unsqueeze(1), at]).log_softmax(-1)
    return after.gather(-1, torch.tensor(ids, device=rows.device).expand(len(rows), -1).unsqueeze(-1)).sum((1, 2))


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
