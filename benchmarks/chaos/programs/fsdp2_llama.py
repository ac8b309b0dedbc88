"""A small Llama as torchtitan trains its own: FSDP2 on each block and the root, stateful parts of one training state.

Its state is kept by Perdure's `Checkpointer` in place of torchtitan's, in the memory of the nodes alone.
"""

import math
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from kept import Keeper
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DIM, LAYERS, HEADS, VOCABULARY, LENGTH, BATCH = 48, 2, 4, 64, 16, 4
STEPS_OF_LENGTH = 10
WARMUP = 20


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x, freqs_cis):
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, HEADS, -1) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, freqs_cis), rotate(k, freqs_cis)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, 4 * DIM, bias=False) for _ in range(2))
        self.w2 = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = RMSNorm(DIM), RMSNorm(DIM)

    def forward(self, x, freqs_cis):
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        angles = torch.outer(torch.arange(LENGTH), 1.0 / 10000 ** (torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS)))
        self.register_buffer("freqs_cis", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self.layers = nn.ModuleDict({str(number): TransformerBlock() for number in range(LAYERS)})
        self.norm = RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h))


def rotate(x, freqs_cis):
    cos, sin = (one[None, : x.shape[1], None, :] for one in freqs_cis)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def parallelize(model, mesh):
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def rate_at(step, steps):
    return min(1.0, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


class ModelWrapper(Stateful):
    def __init__(self, model):
        self.model = model
        self.cached = get_model_state_dict(model)

    def state_dict(self):
        return self.cached

    def load_state_dict(self, state_dict):
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))
        self.cached = get_model_state_dict(self.model)


class OptimizersContainer(Stateful):
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state_dict):
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=self.options)


class TrainState(Stateful):
    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state_dict):
        self.step = int(state_dict["step"])


class Tokens(Stateful):
    """An endless stream: the batch follows from how many were read, and from the rank."""

    def __init__(self):
        self.read = 0

    def next(self):
        self.read += 1
        seed = torch.Generator().manual_seed(self.read * 1000 + dist.get_rank())
        begin = torch.randint(0, VOCABULARY, (BATCH, 1), generator=seed)
        stream = (begin + torch.arange(LENGTH + 1)) % VOCABULARY
        return stream[:, :-1], stream[:, 1:]

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state_dict):
        self.read = state_dict["read"]


def main(out: Path, length: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = parallelize(Transformer(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",)))
    optimizers, train_state, loader = OptimizersContainer(model), TrainState(), Tokens()
    steps = length * STEPS_OF_LENGTH
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers.optimizer, partial(rate_at, steps=steps))
    state = {
        "model": ModelWrapper(model),
        "optimizer": optimizers,
        "lr_scheduler": scheduler,
        "dataloader": loader,
        "train_state": train_state,
    }
    keeper = Keeper(out, model, state)
    while train_state.step < steps:
        tokens, labels = loader.next()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        scheduler.step()
        train_state.step += 1
        keeper.keep(train_state.step)
    keeper.finish(train_state.step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
