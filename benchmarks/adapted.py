"""Time of a heatmap of a network of one's own around copied Mamba layers, and of the same weights in transformers'
model, which has a reader of its own."""

from __future__ import annotations

import argparse
import time

import torch
from timing import machine
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import MambaConfig, MambaForCausalLM
import ssmscope

WIDTH, LAYERS, STATES, RANK, VOCABULARY = 256, 4, 16, 16, 100


class Mamba(nn.Module):
    """mamba-minimal's block: its parts have the usual names, and its scan is a loop."""

    def __init__(self) -> None:
        super().__init__()
        inner = 2 * WIDTH
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 2 * inner, bias=False), nn.Linear(inner, WIDTH, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(inner, RANK + 2 * STATES, bias=False), nn.Linear(RANK, inner)
        self.A_log, self.D = nn.Parameter(torch.zeros(inner, STATES)), nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.in_proj(x).chunk(2, -1)
        x = silu(self.conv1d(x.mT)[..., : x.shape[1]].mT)
        step, B, C = self.x_proj(x).split([RANK, STATES, STATES], -1)
        delta, h, found = softplus(self.dt_proj(step)), x.new_zeros(*x.shape[::2], STATES), []
        for t in range(x.shape[1]):
            h = torch.exp(delta[:, t, :, None] * -self.A_log.exp()) * h + (delta * x)[:, t, :, None] * B[:, t, None]
            found.append((h * C[:, t, None]).sum(-1))
        return self.out_proj((torch.stack(found, 1) + self.D * x) * silu(z))


class Network(nn.Module):
    """The library's model with its mixers copied."""

    def __init__(self, model: MambaForCausalLM) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = model.backbone.embeddings, model.backbone.norm_f, model.lm_head
        self.norms = nn.ModuleList(block.norm for block in model.backbone.layers)
        self.mixers = nn.ModuleList(Mamba() for _ in model.backbone.layers)
        for mixer, block in zip(self.mixers, model.backbone.layers):
            mixer.load_state_dict(block.mixer.state_dict())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x))
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": STATES, "time_step_rank": RANK}
    library = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes)).eval()
    models = {"own": ssmscope.load(Network(library).eval()), "library": ssmscope.load(library)}
    print(machine())
    print("tokens   own network   library's model   ratio   (least CPU seconds of a heatmap)")
    for length in options.lengths:
        ids = torch.randint(VOCABULARY, (1, length))
        least = dict.fromkeys(models, float("inf"))
        for _ in range(options.repeats):
            for name, model in models.items():
                begin = time.process_time()
                ssmscope.heatmap(model.trace(ids=ids))
                least[name] = min(least[name], time.process_time() - begin)
        print(f"{length:6} {least['own']:13.3f} {least['library']:17.3f} {least['own'] / least['library']:7.2f}")


if __name__ == "__main__":
    main()
