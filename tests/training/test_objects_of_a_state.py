"""Optimizers and other objects of a state are after a restore, from memory or from storage, as they were saved."""

from __future__ import annotations

import copy
import random
import shutil
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from perdure_training.checkpoint import Checkpointer
from perdure_training.checkpoint.own_generators import is_generator
from perdure_training.checkpoint.saved_structure import set_value
from perdure_training.checkpoint.values import capture
from tests.training.any_state import same
from tests.training.checkpoint_agent import checkpoint_agent

State = dict[str, Any]


class EightBits(torch.optim.Optimizer):
    """Keeps numbers of 8 bits, and a master copy with more bits than the parameter has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["numbers"] = torch.zeros(parameter.shape, dtype=torch.uint8)
                state["master"] = parameter.double() / 3
                state["steps"] = 0
                state["parts"] = {"scale": torch.tensor(1 / 3, dtype=torch.float64)}
            state["numbers"] += 1
            state["steps"] += 1
            state["master"] -= parameter.grad * state["numbers"] / 300
            parameter.copy_(state["master"])


def trained_with(
    create: Callable[[Any], torch.optim.Optimizer], *, dtype: torch.dtype = torch.float32
) -> Callable[[int, int], State]:
    def make(seed: int, steps: int) -> State:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)}).to(dtype)
        optimizer = create(model["used"].parameters())
        state: State = {"model": model, "optimizer": optimizer}
        for _ in range(steps):
            step(state)
        return state

    return make


def step(state: State) -> None:
    model, optimizer = state["model"], state["optimizer"]
    inputs = torch.ones(2, 4, dtype=model["used"].weight.dtype)

    def loss() -> Any:
        optimizer.zero_grad()
        value = model["used"](inputs).square().mean()
        value.backward()
        return value

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(loss)
    else:
        loss()
        optimizer.step()


def all_parameters(seed: int, steps: int) -> State:
    """Of some parameters there never is a gradient, and so no state."""
    state = trained_with(torch.optim.AdamW)(seed, 0)
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), lr=0.1)
    for _ in range(steps):
        step(state)
    return state


def within_others(seed: int, steps: int) -> State:
    """Objects and tensors in dictionaries, lists and tuples."""
    one, two = (trained_with(torch.optim.AdamW)(seed + number, steps) for number in (0, 100))
    return {
        "models": {"one": one["model"], "two": two["model"]},
        "optimizers": [one["optimizer"], two["optimizer"]],
        "pair": (nn.Linear(2, 2), seed),
        "average": {"weight": torch.full((3,), float(seed)), "rest": [torch.full((2,), seed)]},
        "seen": list(range(seed)),
        "by number": {0: float(seed), 1: {"two": seed}},
        "metrics": {"loss": 0.5 * steps},
    }


def empty(seed: int, steps: int) -> State:
    """State dicts that have nothing."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return {"scaler": scaler, "activation": nn.ReLU(), "extra": {}, "step": steps}


class Grows:
    """Has other values while it is used."""

    def __init__(self, steps: int) -> None:
        self._state: dict[str, Any] = {"position": steps, "of workers": {0: steps, 7: {"of": steps}}}
        if steps:
            self._state |= {"workers": {"first": torch.arange(steps), "none": None}, "order": [1, 2]}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = dict(state)


def growing(seed: int, steps: int) -> State:
    return {"loader": Grows(steps)}


BITS = ("MT19937", "Philox", "SFC64", "PCG64DXSM")


def generators(seed: int, steps: int) -> State:
    """The script's own, of which it has drawn some numbers."""
    state: State = {
        "shuffles": torch.Generator().manual_seed(seed),
        "augments": random.Random(seed),
        "of workers": [numpy.random.default_rng(seed), numpy.random.RandomState(seed)],
        "by bits": {kind: numpy.random.Generator(getattr(numpy.random, kind)(seed)) for kind in BITS},
    }
    for _ in range(steps):
        drawn(state)
    return state


def drawn(state: State) -> list[float]:
    new, old = state["of workers"]
    own = [torch.rand(1, generator=state["shuffles"]).item(), state["augments"].gauss(), new.random(), old.randn()]
    return own + [one.random() for one in state["by bits"].values()]


def dictionaries(seed: int, steps: int) -> State:
    """Of types of their own, with the same names each time."""
    counts = Counter({"seen": steps, "left": seed})
    by_class: defaultdict[str, Counter[str]] = defaultdict(Counter)
    by_class["cat"].update({"right": steps + 1})
    return {"counts": counts, "by class": by_class, "ordered": OrderedDict(b=steps, a=seed)}


KINDS: dict[str, Callable[[int, int], State]] = {
    "eight bits": trained_with(EightBits, dtype=torch.bfloat16),
    "averaged, of bfloat16": trained_with(
        lambda parameters: torch.optim.ASGD(parameters, lr=0.1), dtype=torch.bfloat16
    ),
    "a step needs the loss": trained_with(lambda parameters: torch.optim.LBFGS(parameters, max_iter=2)),
    "without state": trained_with(lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "unused parameters": all_parameters,
    "within others": within_others,
    "empty": empty,
    "growing": growing,
    "generators": generators,
    "dictionaries": dictionaries,
}


class Site:
    """One rank in one generation after another, with an agent and a storage."""

    def __init__(self, folder: Path, set_variable: Callable[[str, str], None]) -> None:
        self.memory = folder / "memory"
        self._set = set_variable
        self._generation = 0
        self._store: TCPStore | None = None

    def begin(self, state: State, *, lose_memory: bool = False) -> tuple[Checkpointer, int | None]:
        if lose_memory:
            shutil.rmtree(self.memory)
        self._generation += 1
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._set("PERDURE_STORE", f"127.0.0.1:{self._store.port}")
        self._set("PERDURE_GENERATION", str(self._generation))
        checkpointer = Checkpointer(every=1)
        return checkpointer, checkpointer.restore(state)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with checkpoint_agent(tmp_path / "storage", every=1000) as agent:
        site = Site(tmp_path, monkeypatch.setenv)
        variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        identity = {"PERDURE_MEMORY_DIR": str(site.memory), "PERDURE_RUN_ID": "run", "TORCHELASTIC_RUN_ID": "run"}
        for name, value in (variables | identity | agent.environment).items():
            monkeypatch.setenv(name, value)
        yield site


@pytest.fixture
def counted() -> Iterator[list[object]]:
    """The optimizers that have made a step which the training's counters see."""
    optimizers: list[object] = []
    handle: RemovableHandle = register_optimizer_step_post_hook(lambda optimizer, *_: optimizers.append(optimizer))
    yield optimizers
    handle.remove()


@pytest.mark.parametrize("source", ["memory", "storage"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_state_has_comes_back_as_it_was_saved(site: Site, kind: str, source: str, counted: list[object]):
    saved = KINDS[kind](1, 3)
    checkpointer, _ = site.begin(saved)
    expected = copy.deepcopy(capture(saved))
    assert checkpointer.save(3, saved, durable=True)
    assert checkpointer.wait_until_durable(60)
    state = KINDS[kind](2, 0)
    held = dict(state)
    counted.clear()
    _, step_ = site.begin(state, lose_memory=source == "storage")
    assert step_ == 3
    assert not counted
    found = capture(state)
    assert same(found, expected), (found, expected)
    for name, value in held.items():
        if isinstance(value, dict | list) or hasattr(value, "load_state_dict") or is_generator(value):
            assert state[name] is value, "the script holds on to it"
    if kind == "generators":
        assert drawn(held) == drawn(saved)
    if kind == "dictionaries":
        assert [type(one) for one in held.values()] == [Counter, defaultdict, OrderedDict]
        assert type(held["by class"]["cat"]) is Counter
        assert held == saved
    if kind == "within others":
        assert same(held["pair"][0].state_dict(), expected["pair"][0]), "of a tuple, the objects"
        return
    if "optimizer" in state:
        for one in (saved, state):
            step(one)
        assert same(capture(state), capture(saved)), "the training continues as if nothing had happened"


def test_objects_within_others_must_be_those_that_were_saved(site: Site):
    saved: State = {"models": {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}}
    checkpointer, _ = site.begin(saved)
    checkpointer.save(1, saved)
    checkpointer.flush()
    with pytest.raises(KeyError, match="models: saved was a dict of one, two, the state has a dict of one: restore"):
        site.begin({"models": {"one": nn.Linear(2, 2)}})


@pytest.mark.parametrize("source", ["memory", "storage"])
def test_a_model_of_another_type_is_refused_and_not_converted(site: Site, source: str):
    saved: State = {"model": nn.Linear(2, 2).double()}
    checkpointer, _ = site.begin(saved)
    assert checkpointer.save(1, saved, durable=True)
    assert checkpointer.wait_until_durable(60)
    with pytest.raises(KeyError, match=r"model\.weight.*torch\.float64.*torch\.float32"):
        site.begin({"model": nn.Linear(2, 2)}, lose_memory=source == "storage")


def test_an_optimizer_is_as_new_where_nothing_is_loaded(site: Site, counted: list[object]):
    for kind in ("eight bits", "a step needs the loss", "unused parameters"):
        state, other = KINDS[kind](1, 0), KINDS[kind](1, 0)
        _, step_ = site.begin(state)
        assert step_ is None
        assert same(capture(state), capture(other))
    assert not counted


@pytest.mark.parametrize("source", ["memory", "storage"])
def test_dictionaries_that_have_grown_come_back_with_their_types(site: Site, source: str):
    def made() -> State:
        return {
            "by class": defaultdict(Counter),
            "losses": {},
            "ordered": OrderedDict(first=1),
            "averages": defaultdict(dict, {"first": {"mean": torch.zeros(2)}}),
            "counts": Counter(),
        }

    saved = made()
    saved["by class"]["cat"].update({"right": 3, 7: 2})
    saved["by class"][5]["wrong"] += 1
    saved["losses"] |= {0: 0.5, "last": {"of": OrderedDict(b=1, a=2)}, (1, 2): [3]}
    saved["ordered"]["second"] = OrderedDict(c=3)
    saved["averages"]["second"]["mean"] = torch.ones(3)
    saved["counts"].update([1, 1, "one"])
    checkpointer, _ = site.begin(saved)
    assert checkpointer.save(3, saved, durable=True)
    assert checkpointer.wait_until_durable(60)
    state = made()
    held = dict(state)
    assert site.begin(state, lose_memory=source == "storage")[1] == 3
    assert same(held, saved), (held, saved)
    assert [type(one) for one in held.values()] == [type(one) for one in saved.values()]
    assert {type(one) for one in held["by class"].values()} == {Counter}
    assert type(held["losses"]["last"]["of"]) is OrderedDict
    assert type(held["ordered"]["second"]) is OrderedDict
    held["by class"]["dog"]["right"] += 1


def test_a_value_of_one_of_many_parameters_is_found_without_a_search():
    class Unsearched(dict[Any, Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("each of 100,000 parameters would be looked at 100,000 times")

    state = {"state": Unsearched({number: {"step": 0} for number in range(3)})}
    set_value(state, ("state", "2", "step"), 5)
    assert state["state"][2] == {"step": 5}


def test_what_a_defaultdict_makes_has_its_type_again(site: Site):
    saved: State = {"by class": defaultdict(Counter, {"cat": Counter(right=3)})}
    checkpointer, _ = site.begin(saved)
    checkpointer.save(1, saved)
    checkpointer.flush()
    state: State = {"by class": defaultdict(Counter)}
    held = state["by class"]
    site.begin(state)
    assert state["by class"] is held
    held["cat"].update(["right"])
    held["dog"].update(["right"])
    assert held == {"cat": {"right": 4}, "dog": {"right": 1}}


def test_a_generator_of_another_kind_is_refused_by_its_name(site: Site):
    saved: State = {"shuffles": random.Random(1)}
    checkpointer, _ = site.begin(saved)
    checkpointer.save(1, saved)
    checkpointer.flush()
    with pytest.raises(KeyError, match="shuffles: what was saved is no state of a Generator"):
        site.begin({"shuffles": torch.Generator()})
