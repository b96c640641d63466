"""What `num_assistant_tokens="auto"` learns and chooses, in worlds of which everything is known: their clock is
simulated, their drafter's probabilities are the chances that its tokens are accepted, and the best fixed depth can be
tried out beside it.
"""

import json
import math
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from close import assert_close
from torch import Tensor

from eagle31_hf import clock
from eagle31_hf.acceptance import CHAINS, PLAIN, TREES
from eagle31_hf.clock import Clock
from eagle31_hf.generation.planning.auto import AutoPlanner
from eagle31_hf.generation.planning.controller import COUNTS, TOP_K, LevelController
from eagle31_hf.generation.planning.costs import MAX_DEPTH, Calibration, CostModel, Rate
from eagle31_hf.generation.planning.exploration import ALLOWED_LOSS, Exploration
from eagle31_hf.generation.planning.knowledge import Knowledge
from eagle31_hf.generation.planning.plan import TREE_NODES, UNLIMITED, DraftingSettings, FixedPlanner, Plan, Selection
from eagle31_hf.generation.proposer import Proposer
from eagle31_hf.generation.rejection_sampler import Accepted
from eagle31_hf.generation.tree import DraftTokens, HostDrafts
from eagle31_hf.generation.unread_states import AuxStates

# The figures that auto must reach.
LEARNING_ROUNDS = 40  # after so many rounds in a world,
SHARE_OF_BEST = 0.97  # so much of the tokens a second of the best fixed setting,
SHARE_OF_PLAIN = 0.97  # or, of a drafter that is never right, of plain decoding,
LEAST_PLAIN_ROUNDS = 450  # with so many of 564 rounds without drafts,
MOST_PLAIN_ROUNDS = 560  # and once drafting pays again, so many of 600 rounds without
MOST_PLAIN_LATER = 10  # and so many of the 100 after them.
SHARE_OF_UNKNOWING = 0.95  # From times that were kept, so much of what is reached where nothing is known.
FREE_TO_DEAR = 4  # Trees have so many times as many drafts where tokens of a forward are free as where they are dear.

CPU = torch.device("cpu")


# --- what is learnt ---


def costs(samples: dict[int, list[float]]) -> CostModel:
    known = CostModel()
    for size, seconds in samples.items():
        for second in seconds:
            known.add(size, second)
    return known


def test_costs_are_what_is_usual_and_lines_between():
    known = costs({1: [10.0] * 4 + [500.0], 5: [14.0] * 5})
    assert known.estimate((1, 2, 3, 5, 9)) == [10.0, 11.0, 12.0, 14.0, 18.0]
    assert CostModel().estimate((1, 7)) == [0.0, 0.0]
    assert costs({4: [20.0]}).estimate((1, 4, 6)) == [20.0, 20.0, 22.0]


def test_old_costs_are_forgotten():
    known = costs({1: [10.0] * 9 + [30.0] * 9})
    assert known.estimate((1,)) == [30.0]


def test_one_slow_forward_does_not_make_all_larger_ones_slow():
    """Sizes seen once lie; what contradicts many others is averaged with them."""
    known = costs({1: [10.0] * 9, 4: [25.0], 8: [12.0] * 9, 16: [14.0] * 9})
    estimates = known.estimate((1, 4, 8, 16))
    assert estimates == sorted(estimates)
    assert estimates[2] < 14.0
    assert (estimates[0], estimates[3]) == (10.0, 14.0)


def test_rates_follow_what_happens_now():
    rate = Rate()
    assert rate.value == 0.0
    for _ in range(50):
        rate.add(1, 1.0)
    for _ in range(50):
        rate.add(4, 1.0)
    assert 3.0 < rate.value < 4.0
    before = rate.value
    rate.fade()
    assert rate.value == pytest.approx(before), "it only weighs less"
    for _ in range(20):
        rate.add(2, 1.0)
    assert rate.value == pytest.approx(2.0, abs=0.5)


TRUTHS = {  # slope, intercept, what every further depth takes away
    "as_it_says": (1.0, 0.0, 0.0),
    "overconfident": (0.6, -0.5, 0.0),
    "timid": (1.6, 0.8, 0.0),
    "worse_with_depth": (1.0, 0.5, -0.5),
}


@pytest.mark.parametrize(("slope", "intercept", "decay"), TRUTHS.values(), ids=TRUTHS)
def test_chances_are_calibrated(slope, intercept, decay):
    calibration, dice = Calibration(), random.Random(0)

    def truth(chance: float, depth: int) -> float:
        return 1 / (1 + math.exp(-slope * math.log(chance / (1 - chance)) - intercept - decay * depth))

    for _ in range(4000):
        chance, depth = dice.uniform(0.05, 0.99), dice.randrange(5)
        calibration.learn(math.log(chance), depth, dice.random() < truth(chance, depth))
    for depth in range(5):
        chances = [0.2, 0.5, 0.8, 0.95]
        found = calibration(torch.tensor([[chances]]).log(), depth).exp()[0, 0]
        expected = torch.tensor([truth(chance, depth) for chance in chances])
        assert_close(f"chances at depth {depth}", found, expected, 0.17)


def test_learning_is_quick():
    """What one depth teaches holds for the others, until they say otherwise."""
    calibration = Calibration()
    for _ in range(20):
        calibration.learn(math.log(0.5), 0, accepted=True)
    assert 0.7 < float(calibration(torch.tensor([[[0.5]]]).log(), MAX_DEPTH - 1).exp()) < 0.95


def test_probabilities_of_nothing_and_of_all_are_learnt_from():
    calibration = Calibration()
    for log_prob in (float("-inf"), 0.0, -1e-9, -1e4):
        calibration.learn(log_prob, 0, accepted=False)
    chances = calibration(torch.tensor([[[float("-inf"), 0.0]]]), 0)
    assert bool(chances.isfinite().all())


# --- what is chosen ---


class Drafter:
    """A world's drafter, in place of `DrafterRunner` and `DraftSampler`: its forwards take time, and `log_probs` has
    the chance of each of its tokens. No two tokens of a round have the same id."""

    like = torch.zeros(1)
    reads_text = False
    noise = None

    def __init__(self, world: "World"):
        self.world = world
        self.log_probs: dict[int, float] = {}

    def read(self, unread: AuxStates, depth: int) -> tuple[Tensor, Tensor]:
        self.world.spend(self.world.step, 1)
        return torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)

    def step(self, ids: Tensor, *_) -> tuple[Tensor, Tensor]:
        width = ids.shape[1]
        self.world.spend(self.world.step, width)
        return torch.zeros(1, width, 1), torch.zeros(1, width, 1)

    def settle(self) -> None:
        """Nothing is kept."""

    def noise_after(self, *_) -> None:
        """Nothing is drawn."""

    def scored(self, logits: Tensor, top_k: int, *_) -> tuple[Tensor, Tensor]:
        log_probs = self.world.log_probs(logits.shape[1], top_k)
        first = len(self.log_probs) + 1
        ids = torch.arange(first, first + log_probs.numel()).view_as(log_probs)
        self.log_probs.update(zip(ids.flatten().tolist(), log_probs.flatten().tolist(), strict=True))
        return log_probs, ids

    def draw(self, logits: Tensor, *_) -> tuple[Tensor, Tensor, bool]:
        return self.scored(logits[:, None], 1)[1][:, 0], logits, True


@dataclass
class World:
    """Forwards of so many milliseconds, and a drafter that is right with the chance it says. `keep`: of drafts so many
    are not refused whatever it says, so 0 is a drafter that is never right. `decree`: the chance that a node's first
    child is right, whatever the drafter says. `tree`: milliseconds that a round takes longer with a tree. `slowdown`:
    how many times as long all takes as on a machine that does nothing else."""

    verify: tuple[float, float] = (10.0, 0.15)  # at all, and a token
    step: tuple[float, float] = (1.0, 0.05)
    sureness: float = 2.0
    keep: float = 1.0
    decree: float | None = None
    tree: float = 0.0
    loading: float = 0.0
    slowdown: float = 1.0
    loaded: set[int] = field(default_factory=set)
    now: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    torch_dice: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def perf_counter(self) -> float:
        return self.now

    def spend(self, price: tuple[float, float], num_tokens: int) -> float:
        seconds = (price[0] + price[1] * num_tokens) / 1000 * self.slowdown * self.dice.uniform(0.97, 1.03)
        self.now += seconds
        return seconds

    def load(self, num_nodes: int) -> float:
        """Returns the seconds that kernels for a size take to be loaded."""
        if num_nodes in self.loaded or not self.loading:
            return 0.0
        self.loaded.add(num_nodes)
        return self.spend((self.loading, 0.0), 0)

    def log_probs(self, width: int, top_k: int) -> Tensor:
        """(1, width, top_k): some nodes surer than others."""
        logits = torch.randn(1, width, 8, generator=self.torch_dice)
        logits[..., 0] += self.sureness * (1 + torch.randn(1, width, generator=self.torch_dice))
        return (1.5 * logits).log_softmax(-1).sort(dim=-1, descending=True).values[..., :top_k]

    def draft(self, drafter: Drafter, plan: Plan) -> DraftTokens:
        text = torch.zeros(1, 1, dtype=torch.long)
        if plan.depth < 1:
            return DraftTokens.none(text)
        return Proposer(drafter, drafter).propose(AuxStates(torch.zeros(1, 1, 1), text, [1]), [text], plan)

    def accept(self, drafts: HostDrafts, log_probs: dict[int, float]) -> Accepted:
        """Of a node's children at most one is right, each with the chance its log-probability gives."""
        children, tokens, path = drafts.children[0], [], [0]
        while (right := self.right_of(children[path[-1]], log_probs)) is not None:
            tokens.append(right)
            path.append(children[path[-1]][right])
        own = -1
        if drafts.guess and self.keep and self.dice.random() < math.exp(drafts.guess_log_probs[0][0]):
            own = drafts.guess[0][0]
        return Accepted([[*tokens, own]], [path], [len(tokens)], [[]], [False], False, drafts)

    def right_of(self, children: dict[int, int], log_probs: dict[int, float]) -> int | None:
        left = self.dice.random()
        if self.decree is not None:
            return next((token for token in children if left < self.decree), None)
        for token in children:
            chance = 0.0 if self.keep == 0.0 else math.exp(log_probs[token])
            if left < chance:
                return token
            left -= chance
        return None

    def expected_tokens(self, drafts: DraftTokens, log_probs: dict[int, float]) -> float:
        """The target's own, and every draft with the chance that its path is right."""
        if not self.keep or not drafts.ids.shape[1]:
            return 1.0
        count = drafts.num_nodes
        paths = torch.ones(count, count).tril() if drafts.is_chain else drafts.ancestors[0].float()
        return float((paths @ torch.tensor([0.0, *(log_probs[token] for token in drafts.ids[0].tolist())])).exp().sum())

    def decode(self, planner: AutoPlanner | FixedPlanner, rounds: int) -> tuple[float, float]:
        """Returns the tokens to be expected, and seconds."""
        began, num_tokens = self.now, 0.0
        for _ in range(rounds):
            plan, start, drafter = planner.plan(100, UNLIMITED, [0], 1), self.now, Drafter(self)
            drafts = self.draft(drafter, plan)
            self.spend((0.0 if drafts.is_chain else self.tree, 0.0), 0)
            seconds = {"draft": self.now - start, "accept": 0.0}
            seconds["verify"] = self.spend(self.verify, drafts.num_nodes) + self.load(drafts.num_nodes)
            accepted = self.accept(drafts.on_host()[0], drafter.log_probs)
            by_decree = self.decree is not None
            num_tokens += len(accepted.tokens[0]) if by_decree else self.expected_tokens(drafts, drafter.log_probs)
            planner.observe(drafts.num_nodes, accepted, seconds)
        return num_tokens, self.now - began


@pytest.fixture
def world(monkeypatch):
    def make(**figures) -> World:
        made = World(**figures)
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=made.perf_counter))
        return made

    return make


def auto(known: Knowledge | None = None, *args) -> AutoPlanner:
    """A planner that knows nothing, or what it is given; by the world's clock."""
    return AutoPlanner(Knowledge() if known is None else known, Clock(CPU), *args)


def controller_of(known: Knowledge, going: tuple[int, ...] = (0,)) -> LevelController:
    """The controller of a round that draws a tree and tries nothing out."""
    return LevelController(known, Clock(CPU), TOP_K, list(going), 1, None)


def rate(decoded: tuple[float, float]) -> float:
    return decoded[0] / decoded[1]


CHAINS_OF = [(0, 1), (1, 1), (2, 1), (3, 1), (5, 1), (8, 1), (12, 1)]  # depths, and for trees numbers of nodes
TREES_OF = [(3, 9), (5, 17), (7, 25), (7, 61)]
WORLDS = {
    "cheap_drafter-chains": ({"step": (0.3, 0.02)}, CHAINS_OF),
    "dear_drafter-chains": ({"step": (3.0, 0.1)}, CHAINS_OF),
    "unsure-chains": ({"sureness": 0.3}, CHAINS_OF),
    "tokens_are_free-trees": ({"verify": (10.0, 0.0)}, TREES_OF),
    "tokens_are_dear-trees": ({"verify": (8.0, 2.0)}, TREES_OF),
    "sure-trees": ({"sureness": 5.0}, TREES_OF),
}


@pytest.mark.parametrize(("figures", "shapes"), WORLDS.values(), ids=WORLDS)
def test_no_fixed_setting_is_better(world, figures, shapes):
    top_k = TOP_K if shapes is TREES_OF else 1
    fixed = {shape: rate(world(**figures).decode(FixedPlanner(shape[0], top_k, shape[1]), 100)) for shape in shapes}
    ours, planner = world(**figures), auto(None, top_k)
    ours.decode(planner, LEARNING_ROUNDS)
    assert rate(ours.decode(planner, 300)) > SHARE_OF_BEST * max(fixed.values()), fixed


def test_trees_are_drawn_where_tokens_are_free(world):
    chosen = {}
    for name, verify in {"free": (10.0, 0.0), "dear": (5.0, 3.0)}.items():
        ours, planner = world(verify=verify, sureness=1.0), auto()
        ours.decode(planner, 200)
        chosen[name] = sum(count * times for count, times in planner.drafts_by_count.items()) / 200
    assert chosen["free"] > FREE_TO_DEAR * chosen["dear"]


def test_a_drafter_that_is_never_right_costs_next_to_nothing(world):
    ours, planner = world(keep=0.0), auto()
    ours.decode(planner, 64)
    plain = rate(world(keep=0.0).decode(FixedPlanner(0), 500))
    assert rate(ours.decode(planner, 500)) > SHARE_OF_PLAIN * plain
    assert planner.choices["plain"] > LEAST_PLAIN_ROUNDS


@pytest.mark.parametrize(("chance", "share"), [(0.2, 0.95), (0.45, 0.97), (0.65, 1.08)])
def test_a_small_target_is_served_from_the_first_call_on(world, chance, share):
    """A draft step takes a fifth of the target's forward, a tree half of one more: chains may pay, trees do not."""
    figures = {"verify": (6.2, 0.45), "step": (1.3, 0.15), "tree": 2.8, "decree": chance}
    plain = rate(world(**figures).decode(FixedPlanner(0), 500))
    calls = [rate(world(**figures, dice=random.Random(seed)).decode(auto(), 600)) for seed in range(3)]
    assert sum(calls) / len(calls) > share * plain, calls


def test_first_uses_of_kernels_are_not_held_against_a_kind(world):
    """On a GPU the first round of a size took 325 ms, where others took 20: auto drafted nothing for two calls."""
    best = rate(world().decode(FixedPlanner(5), 500))
    ours, planner = world(loading=300.0), auto()
    planner.loads_kernels = True
    ours.decode(planner, LEARNING_ROUNDS)
    ours.loading = 0.0
    assert rate(ours.decode(planner, 100)) > SHARE_OF_BEST * best


def test_a_drafter_that_pays_a_little_is_not_given_up_by_bad_luck(world):
    """Plain rounds give 86% of what chains of one draft do, and chains were explored by a few rounds alone."""
    figures = {"verify": (21.7, 1.5), "step": (2.4, 0.0), "decree": 0.36}
    best = rate(world(**figures).decode(FixedPlanner(1), 500))
    calls = [rate(world(**figures, dice=random.Random(seed)).decode(auto(None, 1), 480)) for seed in range(6)]
    assert sum(calls) / len(calls) > 0.965 * best, [call / best for call in calls]


def test_an_exploration_ends_when_it_has_lost_what_it_may():
    exploration, chosen = Exploration(), []
    for _ in range(200):
        chosen.append(exploration.choose((PLAIN, CHAINS, TREES)))
        exploration.add(chosen[-1], 1, 1.0 if chosen[-1] == PLAIN else 2.0)
    assert chosen[0] == PLAIN, "it is what all others are compared with"
    begun = [i for i in range(1, 200) if chosen[i] == CHAINS and chosen[i - 1] == PLAIN]
    pauses = [after - before for before, after in pairwise(begun)]
    assert len(begun) >= 3
    assert pauses == sorted(set(pauses)), "each pause is longer than the one before"
    assert chosen.count(CHAINS) <= len(begun) * (1 + ALLOWED_LOSS), "each of them loses a token"
    assert TREES not in chosen, "chains give half of what plain decoding does"


def test_a_trial_that_fails_is_not_tried_again():
    """One that needs more memory than there is would fail every call."""
    arm, seen = Exploration().arms[TREES], []
    while (trial := arm.next_trial()) is not None:
        seen.append(trial)
    assert seen == [8, 16, 32, 4]


def test_one_slow_plain_round_is_forgotten():
    exploration = Exploration()
    exploration.add(PLAIN, 1, 1.0)
    exploration.add(PLAIN, 1, 0.01)
    assert exploration.rate == pytest.approx(100)


def test_rates_are_those_of_a_sequence(world):
    """A batch of which few sequences go on gives fewer tokens, with or without drafts."""
    world()
    known = Knowledge()
    seconds = {"draft": 0.0, "verify": 1.0, "accept": 0.0}
    for tokens, num_drafts in (([[1], [1]], [0, 0]), ([[1], [0]], [0, None])):
        planner = auto(known)
        planner.observe(
            1, Accepted(tokens, [[0], []], num_drafts, [[], []], [False] * 2, False, HostDrafts([[], []])), seconds
        )
        assert known.exploration.rate == pytest.approx(1.0)


def test_nothing_is_learnt_from_sequences_that_had_ended(world):
    """In lock-step their drafts are padding, and so is what they accept."""
    world()
    known = Knowledge()
    planner = auto(known, 1)
    seconds = {"draft": 1.0, "verify": 1.0, "accept": 0.0}
    for drafts in ([[], []], [[0], [0]]):
        controller = planner.plan(9, UNLIMITED, [0], 1).controller
        if controller is not None:
            controller.width(torch.tensor([[-0.5], [-0.5]]), 0)
        paths = [[0], list(range(1 + len(drafts[1])))]
        tokens = [[3], [0] * len(paths[1])]
        host = HostDrafts(drafts, log_probs=[[-0.5] * len(ids) for ids in drafts])
        accepted = Accepted(tokens, paths, [0, None], [[], []], [False, True], False, host)
        planner.observe(1 + len(drafts[0]), accepted, seconds)
    assert known.exploration.arms[CHAINS].rounds == 1
    assert known.calibration.seen[0] == 1


def test_a_kind_that_is_faster_is_kept():
    exploration, seconds = Exploration(), {PLAIN: 1.0, CHAINS: 0.9, TREES: 0.8}
    chosen = []
    for _ in range(400):
        chosen.append(exploration.choose(tuple(seconds)))
        exploration.add(chosen[-1], 1, seconds[chosen[-1]])
    assert chosen[-200:].count(TREES) > 150
    assert exploration.rate == pytest.approx(1 / 0.8)


def test_drafting_comes_back_when_it_pays_again(world):
    ours, planner = world(keep=0.0), auto()
    ours.decode(planner, 300)
    ours.keep, before = 1.0, Counter(planner.choices)
    ours.decode(planner, 600)
    assert before["plain"] > 200
    assert (planner.choices - before)["plain"] < MOST_PLAIN_ROUNDS
    late = Counter(planner.choices)
    ours.decode(planner, 100)
    assert (planner.choices - late)["plain"] < MOST_PLAIN_LATER


def test_a_new_call_goes_on_with_what_was_learnt(world):
    ours, known = world(), Knowledge()
    ours.decode(auto(known), 100)
    assert auto(known).plan(100, UNLIMITED, [0], 1).controller.trial is None


@pytest.mark.parametrize("slowdown", [1 / 3, 3.0])
@pytest.mark.parametrize("name", ["cheap_drafter-chains", "unsure-chains", "tokens_are_free-trees"])
def test_times_kept_from_a_machine_that_was_busy_mislead_no_longer_than_it_takes_to_learn(world, name, slowdown):
    """And not from one that was idle, where it is busy now."""
    figures, kept, unknowing = WORLDS[name][0], [], []
    for seed in range(4):
        known, later = Knowledge(), Knowledge()
        world(**figures, slowdown=slowdown, dice=random.Random(seed)).decode(auto(known), 40)
        later.take_up(json.loads(json.dumps(known.as_dict())))
        kept.append(rate(world(**figures, dice=random.Random(9 + seed)).decode(auto(later), 60)))
        unknowing.append(rate(world(**figures, dice=random.Random(9 + seed)).decode(auto(), 60)))
        assert later.calibration.seen[0] > known.calibration.seen[0]  # that is no matter of time
    assert sum(kept) > SHARE_OF_UNKNOWING * sum(unknowing), (kept, unknowing)


def gone_on_from_a_second() -> Knowledge:
    """What a process knows whose earlier one kept a second for verifying one node."""
    known, later = Knowledge(), Knowledge()
    known.costs["verify"].add(1, 1.0)
    for kind in (CHAINS, TREES):
        known.costs[kind].add(0, 1.0)
    later.take_up(known.as_dict())
    return later


@pytest.mark.parametrize("change", [0.1, 0.65, 1.5])
def test_a_single_kept_time_is_compared_with_several_of_now(change):
    later = gone_on_from_a_second()
    for _ in range(3):
        later.add_verify(1, change)
    assert [*later.costs["verify"].seconds[1]] == [change]  # the last round's: those before it have shown the change


@pytest.mark.parametrize("seconds", [(5.0, 1.0, 1.1), (1.0, 0.1, 0.9)])
def test_one_round_that_is_out_of_line_is_no_change(seconds):
    later = gone_on_from_a_second()
    for each in seconds:
        later.add_verify(1, each)
    assert [*later.costs["verify"].seconds[1]] == [1.0, *seconds]


def test_rounds_that_read_drafts_off_the_text_are_compared_too():
    later = gone_on_from_a_second()
    for _ in range(3):
        auto(later).observe_lookup(1, {"verify": 3.0, "accept": 1.0})
    assert [*later.costs["verify"].seconds[1]] == [4.0]


def test_times_kept_from_a_machine_as_it_is_now_are_gone_on_from(world):
    known, later = Knowledge(), Knowledge()
    world().decode(auto(known), 40)
    later.take_up(json.loads(json.dumps(known.as_dict())))
    world(slowdown=1.15, dice=random.Random(1)).decode(auto(later), 10)
    assert set(known.costs["verify"].seconds) <= set(later.costs["verify"].seconds)
    assert not any(arm.trials for arm in later.exploration.arms.values() if arm.rounds)


def test_first_rounds_try_every_size(world):
    ours, planner = world(), auto()
    ours.decode(planner, 100)
    assert {1, 3, 5, 9, 17, 33} <= set(planner.known.costs["verify"].seconds)
    assert {1, 2, 4, 8} <= set(planner.known.costs["step"].seconds)


def test_depth_and_size_stay_within_what_is_left(world):
    ours, known = world(), Knowledge()
    assert auto(known).plan(0, UNLIMITED, [0], 1).depth == 0
    ours.decode(auto(known), 100)
    for arm in known.exploration.arms.values():
        arm.due = 1000  # so that no round is plain, to compare
    assert auto(known).plan(3, UNLIMITED, [0], 1).depth == 3
    assert auto(known).plan(100, UNLIMITED, [0], 1).depth == MAX_DEPTH
    assert auto(known, TOP_K, 9).plan(100, UNLIMITED, [0], 1).max_nodes == 9
    assert auto(known, TOP_K, 9).plan(100, 7, [0], 1).max_nodes == 7
    controller = controller_of(known)
    controller.width(torch.zeros(1, 500), 0)  # all of them certain
    assert 5 < controller.select(UNLIMITED).count <= COUNTS[-1]
    assert controller.select(5).count == 5


def test_the_best_candidates_are_ranked_as_they_will_be_verified(world):
    """Before they are put together it is known how deep they lie, and whether they are a chain in every sequence."""
    ours, known = world(verify=(10.0, 0.0)), Knowledge()
    ours.decode(auto(known), 100)
    for levels, expected in (
        ([[[-0.1, -9.0], [-0.2, -9.0]], [[-0.2, -9.1], [-0.3, -9.1]]], Selection(2, 2, True)),
        ([[[-0.1, -9.0], [-0.2, -0.1]], [[-0.2, -9.1], [-9.2, -9.3]]], Selection(2, 2, False)),
        ([[[-0.1, -0.2], [-0.2, -0.1]], [[-9.0, -9.1], [-9.2, -9.3]]], Selection(2, 1, False)),
    ):
        controller = controller_of(known, (0, 1))
        for level, scores in enumerate(levels):
            controller.width(torch.tensor(scores), level)
        assert controller.select(2) == expected


def test_it_says_what_it_chose_and_why(world):
    ours, planner = world(), auto()
    ours.decode(planner, 60)
    assert sum(planner.choices.values()) == 60
    words = planner.explain()
    for figure in ("target forwards take 1", "a draft step 1.", "tokens/s", "drafts a round: ", "by depth: "):
        assert figure in words, f"{figure!r} is not in {words!r}"
    assert auto().explain() == "auto knows nothing yet: no round was timed"


def test_a_fixed_plan_is_the_users():
    assert FixedPlanner(5, 1, 60).plan(100, UNLIMITED, [0], 1) == Plan(5)
    assert FixedPlanner(5, 4, 16).plan(3, UNLIMITED, [0], 1) == Plan(3, 4, 4, 16)
    assert FixedPlanner(5, 4, 16).plan(100, 9, [0], 1) == Plan(5, 4, 4, 9)
    assert FixedPlanner(5, 4, 16).plan(0, UNLIMITED, [0], 1).depth == 0
    assert FixedPlanner(5, 4, 16).explain() == ""
    tree = DraftingSettings(depth=5, threshold=0.0, top_k=4, total_tokens=None)
    assert FixedPlanner.of(tree, draws_trees=True).plan(100, UNLIMITED, [0], 1) == Plan(5, 4, 4, TREE_NODES)
    assert FixedPlanner.of(tree, draws_trees=False).plan(100, UNLIMITED, [0], 1) == Plan(5)
    chain = DraftingSettings(depth=5, threshold=0.0, top_k=None, total_tokens=None)
    assert FixedPlanner.of(chain, draws_trees=True).plan(100, UNLIMITED, [0], 1) == Plan(5)


# --- threads ---


@pytest.fixture
def hasty_threads():
    """Threads take turns as often as they can."""
    found = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(found)


def test_a_drafted_round_may_end_before_the_first_plain_one(world):
    """Another thread has begun that one."""
    ours, known = world(), Knowledge()
    assert auto(known).plan(100, UNLIMITED, [0], 1).controller is None
    ours.decode(auto(known), 1)
    assert known.exploration.arms[CHAINS].rounds == 1


def test_threads_that_share_what_is_learnt(hasty_threads):
    """No observation is lost, and none is seen half made."""
    num_threads, rounds, scores = 4, 20, torch.tensor([[0.9, 0.5, 0.2, 0.1]]).log()
    accepted = Accepted([[1]], [[0]], [0], [[]], [False], False, HostDrafts([[]]))
    seconds = {"draft": 1.0, "verify": 1.0, "accept": 0.0}

    def serve(known: Knowledge, seed: int) -> None:
        torch.set_num_threads(1)
        planner = auto(known)
        for i in range(rounds):
            # always another number of tokens to read
            controller = planner.plan(100, UNLIMITED, [0], 1 + 7 * i + seed).controller
            for level in range(4 if controller else 0):
                controller.width(scores, level)
            planner.observe(9 if controller else 1, accepted, seconds)
        assert planner.explain()

    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(15):
            known = Knowledge()
            list(pool.map(serve, [known] * num_threads, range(num_threads)))
            assert sum(arm.rounds for arm in known.exploration.arms.values()) == num_threads * rounds
            for costs in known.costs.values():
                assert set(costs.seconds) == {size for size, _ in costs.known}


def test_a_round_goes_by_what_was_known_when_it_began(world):
    """Whatever other threads learn meanwhile."""
    ours, known = world(), Knowledge()
    ours.decode(auto(known), 100)
    scores = torch.tensor([[0.9, 0.5, 0.2, 0.1]]).log()

    def choices(controller) -> list:
        chosen = [controller.calibration(scores[:, None], 1), controller.width(scores, 0)]
        selection = controller.select(UNLIMITED)
        return [*chosen, selection.count, selection.depth]

    early, late, later = (controller_of(known) for _ in range(3))
    before = choices(early)
    for size in range(1, 60):
        known.costs["step"].add(size, 1e3)
        known.costs["verify"].add(size, 1e3)
    for _ in range(100):
        known.calibration.learn(-0.1, 1, accepted=False)
    assert_close("choices", choices(late), before)
    assert controller_of(known).step != later.step, "nothing was learnt"
