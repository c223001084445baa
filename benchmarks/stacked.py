"""Selective SSMs of one shape trained together in one stack of tensors, each as `analyze train selective` with
`--set optimizer=adam` trains it. Only the last state is read, and it is a sum over tokens: no scan is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

RATE, DECAY, CLIP, PENALTY = 1e-2, 1e-5, 5.0, 10.0
"""Adam's learning rate and weight decay (a term of the loss), the largest norm of a gradient, and the weight of the
penalty on answers that are all alike."""
TOKENS_AT_ONCE = 2**22
"""Tokens of all models of a stack that are scored together."""


class Examples(NamedTuple):
    """Token `ids` (examples, length), numbers of real tokens and `labels` (examples,), and the padding's id."""

    ids: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    padding: int = 0


class Store:
    """Examples of all models of a stack; shared ones are kept once. `rows` (models, examples) are each model's."""

    def __init__(self, given: Sequence[Examples], rows: Sequence[np.ndarray] | None, device: Any) -> None:
        import torch

        different = list({id(each): each for each in given}.values())
        begins = dict(zip(map(id, different), np.cumsum([0, *(len(each.labels) for each in different)])))
        chosen = [np.arange(len(each.labels)) for each in given] if rows is None else rows
        self.rows = torch.from_numpy(np.stack([begins[id(one)] + row for one, row in zip(given, chosen)])).to(device)
        for name in ("ids", "lengths", "labels"):
            joined = np.concatenate([getattr(each, name) for each in different])
            setattr(self, name, torch.from_numpy(joined).to(device))


class Stack:
    """Selective SSMs of one shape trained together. Every parameter has the models as its first axis."""

    def __init__(self, modules: Sequence[Any], reads_padding: Sequence[bool], device: Any, state: Callable) -> None:
        import torch

        named = [dict(module.named_parameters()) for module in modules]
        self.weights = {
            name: torch.nn.Parameter(torch.stack([each[name].detach() for each in named]).to(device))
            for name in named[0]
        }
        self.reads = torch.tensor(list(reads_padding), device=device)[:, None]
        self.all_read, self.state, self.device = all(reads_padding), state, device

    def logits(self, store: Store, rows: Any) -> Any:
        """Return logits (models, batch, classes) of the examples `rows` (models, batch) of the store."""
        import torch
        from torch.nn.functional import embedding, pad, softplus

        E, A, W_B, W_C, q, p, w = (
            self.weights[name]
            for name in ("embedding.weight", "ssm.A", "ssm.W_B", "ssm.W_C", "ssm.q_delta", "ssm.p_delta", "head.weight")
        )
        ids = store.ids[rows].long()
        models, batch, length = ids.shape
        ids = ids + torch.arange(models, device=ids.device)[:, None, None] * E.shape[1]
        u = embedding(ids, E.flatten(0, 1))
        flat = u.flatten(1, 2)
        step = softplus((flat @ q[:, :, None]).squeeze(-1) + p).view(models, batch, length)
        end = torch.full((models, batch), length, device=ids.device)
        if not self.all_read:
            end = torch.where(self.reads, end, store.lengths[rows])
            step = step * (torch.arange(length, device=ids.device) < end[..., None])
        later = pad(step[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))
        written = (flat @ W_B.mT).view(models, batch, length, -1)
        x = self.state(A, later, step, u, written)
        last = u.gather(2, (end - 1)[..., None, None].expand(-1, -1, 1, u.shape[-1])).squeeze(2)
        y = torch.einsum("rbdn,rbn->rbd", x, last @ W_C.mT)
        found = y @ w.mT
        return torch.cat([torch.zeros_like(found), found], -1) if found.shape[-1] == 1 else found

    def losses(self, logits: Any, labels: Any) -> Any:
        """Return each model's mean cross-entropy with the penalty on answers that are all alike, as in
        `ssmscope.zoo.training.objectives`."""
        found = -logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).mean(1)
        spread = logits.softmax(-1).var(1).clamp(min=1e-12).sqrt()
        spread = spread[:, 1] if logits.shape[-1] == 2 else spread.mean(-1)
        return found + PENALTY * (0.1 - spread).clamp(min=0)

    def clip(self) -> None:
        """Clip each model's gradient."""
        import torch

        gradients = [weight.grad for weight in self.weights.values()]
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        share = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(share.view(-1, *[1] * (gradient.ndim - 1)))

    def norms(self) -> dict[str, np.ndarray]:
        """Return what the authors log of each model; their B_B and B_C are Frobenius norms."""
        get = {name.rpartition(".")[2]: weight.detach() for name, weight in self.weights.items()}
        E = self.weights["embedding.weight"].detach()
        found = {"spectral_abscissa": get["A"].amax((1, 2)), "norm_p": get["p_delta"].abs().amax(1)}
        found |= {"norm_q": get["q_delta"].norm(dim=1), "norm_A": get["A"].abs().amax((1, 2))}
        for name in ("W_B", "W_C"):
            found |= {f"norm_{name}": get[name].flatten(1).norm(dim=1)}
            found |= {f"norm_{name}_entrywise": get[name].abs().sum((1, 2))}
        found["norm_u"] = E.norm(dim=2).amax(1)
        return {name: values.double().cpu().numpy() for name, values in found.items()}

    def score(self, store: Store) -> list[dict[str, float]]:
        """Return each model's accuracy and cross-entropy on all examples of the store."""
        import torch

        models, number = store.rows.shape
        sums = torch.zeros(2, models, dtype=torch.float64, device=self.device)
        size = max(TOKENS_AT_ONCE // (models * store.ids.shape[1]), 1)
        with torch.no_grad():
            for at in range(0, number, size):
                rows = store.rows[:, at : at + size]
                logits, labels = self.logits(store, rows), store.labels[rows]
                sums[0] += (logits.argmax(-1) == labels).sum(1)
                sums[1] -= logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).double().sum(1)
        return [dict(zip(("accuracy", "cross_entropy"), each)) for each in (sums / number).T.tolist()]


def state(A: Any, later: Any, step: Any, u: Any, written: Any) -> Any:
    """Return the last state (models, batch, channels, N): what each token writes, Δ_t (W_B u_t) u_tᵀ, after the decay
    e^{A (Δ_{t+1} + …)} of the steps `later` than it (models, batch, length)."""
    decay = (A[:, None, None] * later[..., None, None]).exp()
    return (decay * (step[..., None] * u)[..., None] * written[..., None, :]).sum(2)


def fit(stack: Stack, store: Store, seeds: Sequence[int], batch: int, epochs: int) -> list[list[dict[str, float]]]:
    """Train the stack, and return each model's norms at the start and, with the mean loss, after every epoch until its
    loss is no longer finite."""
    import torch

    optimizer = torch.optim.Adam(
        stack.weights.values(), lr=RATE, weight_decay=DECAY, fused=torch.device(stack.device).type == "cuda"
    )
    models, number = store.rows.shape
    history = [stack.norms()]
    for epoch in range(epochs):
        draws = {seed: torch.Generator().manual_seed(seed * 1_000_003 + epoch) for seed in dict.fromkeys(seeds)}
        orders = {seed: torch.randperm(number, generator=draw) for seed, draw in draws.items()}
        order = store.rows.gather(1, torch.stack([orders[seed] for seed in seeds]).to(stack.device))
        total, steps = torch.zeros(models, dtype=torch.float64, device=stack.device), 0
        for at in range(0, number, batch):
            rows = order[:, at : at + batch]
            optimizer.zero_grad(set_to_none=True)
            losses = stack.losses(stack.logits(store, rows), store.labels[rows])
            losses.sum().backward()
            stack.clip()
            optimizer.step()
            total, steps = total + losses.detach(), steps + 1
        history.append({"training_loss": (total / steps).cpu().numpy(), **stack.norms()})
        if not np.isfinite(history[-1]["training_loss"]).any():
            break
    found = []
    for at in range(models):
        finite = [bool(np.isfinite(epoch["training_loss"][at])) for epoch in history[1:]]
        kept = history[: 1 + (finite.index(False) if False in finite else len(finite))]
        found.append([{name: float(f"{values[at]:.6g}") for name, values in epoch.items()} for epoch in kept])
    return found
