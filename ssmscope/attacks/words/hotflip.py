"""HotFlip (Ebrahimi et al. 2018): words replaced where the model's own gradient says that it hurts most.

To first order, replacing the word w at some place by w′ changes the loss by (e_w′ − e_w)ᵀ ∇L, the gradient being that
at the place's embedding (their Eq. 4, with embeddings for one-hot characters). One backward pass through the recurrence
ranks all words at all places; only the best flips are put to the model. White box, and without a limit on the meaning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ssmscope.attacks.words.recipes import CANDIDATES
from ssmscope.attacks.words.result import WORD
from ssmscope.core.batching import by_length
from ssmscope.core.mixers import weights_constant
from ssmscope.core.model import Model
from ssmscope.core.tokenizing import is_within_word, tokenize
from ssmscope.errors import InputError
from ssmscope.evaluation import Template
from ssmscope.evaluation.encoded import token_rows
from ssmscope.interp.objective import tokens_that_fit

SPARE = 3
"""How many times as many are spelled out: some are not read as the token that was meant."""

Scores = Callable[[Sequence[str]], Float[np.ndarray, "texts classes"]]


@dataclass(frozen=True)
class Limits:
    """What may be flipped, and for how long.

    Attributes:
        beam: how many texts are kept from one flip to the next.
        flips: how many words are replaced at most; None for no limit.
        candidates: how many flips of each kept text the model is asked about.
        budget: how many texts it is asked about for an example at most, the clean one among them; None for no limit.
        kept: words that are not replaced, in lower case.
        absent: words that are not put in, in lower case.
    """

    beam: int = 1
    flips: int | None = None
    candidates: int = CANDIDATES
    budget: int | None = None
    kept: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()


class Flipped(NamedTuple):
    """Where a search ended: the text, the class scores of it, and what was asked of the model."""

    text: str
    scores: Float[np.ndarray, " classes"]
    queries: int
    gradients: int


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
) -> list[Flipped]:
    """Attack texts that are classified rightly, all together: the gradients of all texts that are kept are taken in
    common batches, and the scores of all their candidates are asked for at once.

    Each step replaces one word more, no place twice, and goes on from the `beam` candidates of the highest loss
    −log p(true), though it may be lower than the step's before: first order errs. A search ends when the answer
    changes, with that text, or where it must, with the text of the highest loss that it met.

    Words that may be replaced are of letters and of one token. What is put in is a token of letters too, and counts
    only where the whole text is read as the same tokens but for this one.

    Args:
        scores: gives the class scores of texts, which stand in the template.
        label_ids: the tokens of a language model's word for each class; None for a classifier.
        ended: called after each step with the number of searches that it ended.

    Raises:
        InputError: the tokenizer does not say where tokens stand (a slow one).
    """
    if not model.tokenizer.is_fast:
        raise InputError(f"hotflip needs to know where tokens stand in a text; the tokenizer of {model.name} is slow")
    vocabulary = Vocabulary.of(model, limits.absent)
    clean = [read(model, text, template, limits.kept) for text in texts]
    searches = [_Search(label, node, [node]) for label, node in zip(labels, clean)]
    for search, row in zip(searches, scores(texts)):
        search.best.judge(row, search.label)
    while going := [search for search in searches if not search.over]:
        nodes = [node for search in going for node in search.beam]
        owners = [search for search in going for _ in search.beam]
        gradients = loss_gradients(model, [n.ids for n in nodes], [s.label for s in owners], label_ids)
        offered: dict[int, list[Node]] = {id(search): [] for search in going}
        for search, found in zip(owners, offers(model, nodes, gradients, vocabulary, template, limits.candidates)):
            search.gradients += 1
            offered[id(search)] += found
        asked = [(search, node) for search in going for node in search.chosen(offered[id(search)], limits)]
        rows = scores([node.text for _, node in asked]) if asked else ()
        reached: dict[int, list[Node]] = {id(search): [] for search in going}
        for (search, node), row in zip(asked, rows):
            node.judge(row, search.label)
            reached[id(search)].append(node)
        for search in going:
            search.settle(reached[id(search)], limits)
        if ended is not None:
            ended(sum(search.over for search in going))
    return [Flipped(each.best.text, each.best.scores, each.queries, each.gradients) for each in searches]


@dataclass(eq=False)
class Node:
    """A text on the way of a search.

    Attributes:
        text: as it stands in the template.
        ids: the tokens of the filled template.
        places: token → (start, stop) in `text`, of the words that may be replaced.
        estimate: of the loss that its last flip added.
        scores: of the classes.
        loss: −log p(true).
    """

    text: str
    ids: tuple[int, ...]
    places: Mapping[int, tuple[int, int]]
    estimate: float = 0.0
    scores: np.ndarray = field(default_factory=lambda: np.empty(0))
    loss: float = -np.inf

    def judge(self, scores: Float[np.ndarray, " classes"], label: int) -> None:
        self.scores, self.loss = scores, float(np.logaddexp.reduce(scores) - scores[label])

    def flipped(self, token: int, id: int, word: str, estimate: float) -> Node:
        """With another word in the place of a token."""
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
class _Search:
    """The search for one example."""

    label: int
    best: Node
    beam: list[Node]
    queries: int = 1
    gradients: int = 0
    depth: int = 0
    over: bool = False

    def chosen(self, offered: Sequence[Node], limits: Limits) -> list[Node]:
        """The candidates that the model is asked about: each text once, the best estimates first."""
        distinct: dict[str, Node] = {}
        for node in sorted(offered, key=lambda node: -node.estimate):
            distinct.setdefault(node.text, node)
        left = None if limits.budget is None else limits.budget - self.queries
        found = list(distinct.values())[:left]
        self.queries += len(found)
        return found

    def settle(self, reached: Sequence[Node], limits: Limits) -> None:
        """Keep the best of the candidates that were asked about."""
        self.depth += 1
        ranked = sorted(reached, key=lambda node: -node.loss)
        won = [node for node in ranked if node.scores.argmax() != self.label]
        if won or (ranked and ranked[0].loss > self.best.loss):
            self.best = (won or ranked)[0]
        self.beam = [node for node in ranked[: limits.beam] if node.places]
        spent = self.depth == limits.flips or self.queries == limits.budget
        self.over = bool(won) or spent or not self.beam


# ---- reading texts, and writing words into them


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that may be put into a text, their words and embeddings, by what stands before their letters: in many
    vocabularies "Ġ" or "▁" begins the token of a word behind a space, and one without is the end of a longer word."""

    ids: Mapping[str, tuple[int, ...]]
    words: Mapping[str, tuple[str, ...]]
    embeddings: Mapping[str, Float[Tensor, "tokens width"]]

    @classmethod
    def of(cls, model: Model, absent: Iterable[str] = ()) -> Vocabulary:
        """The model's tokens that are letters only, without special ones and those of the `absent` words."""
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
    """The embeddings of tokens, without gradients."""
    with torch.no_grad():
        return model.module.get_input_embeddings()(torch.tensor(ids, device=model.device))


def letters(model: Model, number: int) -> str:
    """The word that a token writes, or nothing where it is not of letters only."""
    word = model.tokenizer.decode([number], clean_up_tokenization_spaces=False).strip()
    return word if word.isalpha() else ""


def read(model: Model, text: str, template: Template, kept: frozenset[str] = frozenset()) -> Node:
    """A text with the places of the words in it that may be replaced: those of letters and one token, not `kept`."""
    filled, before = template.fill(text), len(template.before)
    (ids,) = token_rows(model, [filled])
    offsets = tokenize(model.tokenizer, filled, return_offsets_mapping=True)["offset_mapping"]
    shared = Counter(place for start, stop in offsets for place in range(start, stop))
    words = {match.span(): match[0] for match in WORD.finditer(text)}
    special, places = set(model.tokenizer.all_special_ids), {}
    for token, (start, stop) in enumerate(offsets[: len(ids)]):
        if ids[token] in special:  # a word that the tokenizer does not know is among them
            continue
        start += len(filled[start:stop]) - len(filled[start:stop].lstrip())
        place = start - before, stop - before
        word = words.get(place, "")
        if shared[start] > 1:  # a character of several tokens
            continue
        if is_within_word(text, place[0]) or is_within_word(text, place[1]):  # a word ends at no mark
            continue
        if word.isalpha() and word.lower() not in kept:
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
    """For every text its `number` best flips to first order, best first, of those that are read as they are meant."""
    drawn = [best_flips(model, node, each, vocabulary, SPARE * number) for node, each in zip(nodes, gradients)]
    flat = [template.fill(flip.text) for flips in drawn for flip in flips]
    rows = iter(token_rows(model, flat))
    return [[flip for flip in flips if tuple(next(rows)) == flip.ids][:number] for flips in drawn]


def best_flips(
    model: Model, node: Node, gradient: Float[Tensor, "length width"], vocabulary: Vocabulary, number: int
) -> list[Node]:
    """The text after each of the `number` flips that add most to the loss, to first order."""
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
        best = added.flatten().topk(min(number, added.numel()))
        for estimate, at in zip(best.values.tolist(), best.indices.tolist()):
            place, which = divmod(at, len(ids))
            if ids[which] != node.ids[tokens[place]]:
                found.append(node.flipped(tokens[place], ids[which], words[which], estimate))
    return sorted(found, key=lambda flip: -flip.estimate)[:number]


# ---- gradients


def estimates(
    gradient: Float[Tensor, "places width"], old: Float[Tensor, "places width"], new: Float[Tensor, "tokens width"]
) -> Float[Tensor, "places tokens"]:
    """(e_new − e_old)ᵀ ∇L at every place: what a token in the place of another adds to the loss, to first order."""
    return gradient @ new.T - (gradient * old).sum(-1, keepdim=True)


def loss_gradients(
    model: Model, rows: Sequence[Sequence[int]], labels: Sequence[int], label_ids: Sequence[Sequence[int]] | None
) -> list[Float[Tensor, "length width"]]:
    """∂(−log p(true))/∂embeddings of every row of token ids, in batches of alike length that suit the device."""
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
    model: Model,
    embeddings: Float[Tensor, "rows length width"],
    mask: Bool[Tensor, "rows length"],
    label_ids: Sequence[Sequence[int]] | None,
) -> Float[Tensor, "rows classes"]:
    """A classifier's logits, or Σ_j log P(token_j | text, earlier tokens) of every class's word, with gradients."""
    if label_ids is None:
        with model.running(mask=mask):
            return _precise(model.forward_embeddings(embeddings, mask))
    if max(map(len, label_ids)) == 1:
        with model.running(mask=mask):
            logits = _precise(model.forward_embeddings(embeddings, mask))
        return logits.log_softmax(-1)[:, [ids[0] for ids in label_ids]]
    return torch.stack([_continuation(model, embeddings, mask, ids) for ids in label_ids], dim=1)


def _continuation(
    model: Model, embeddings: Tensor, mask: Bool[Tensor, "rows length"], ids: Sequence[int]
) -> Float[Tensor, " rows"]:
    """log P of some tokens behind every row."""
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
