"""What `num_assistant_tokens="auto"` learns and chooses, in worlds of which everything is known: their clock is
simulated, their drafter's probabilities are the chances that its tokens are accepted, and the best fixed depth can be
tried out beside it.
"""

import math
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from close import assert_close
from eagle31_hf.generation.drafting import Fixed, Proposal
from eagle31_hf.generation.tuning import (
    COUNTS,
    MAX_DEPTH,
    TOP_K,
    AutoPilot,
    Calibration,
    Costs,
    FixedPilot,
    Rate,
    Tuner,
)
from eagle31_hf.generation.verify import Verdict

from eagle31_hf.generation import tuning
from eagle31_hf.generation.tree import Candidates

# --- what is learnt ---


def costs(samples: dict[int, list[float]]) -> Costs:
    known = Costs()
    for rows, seconds in samples.items():
        for second in seconds:
            known.add(rows, second)
    return known


def test_costs_are_what_is_usual_and_lines_between():
    known = costs({1: [10.0] * 4 + [500.0], 5: [14.0] * 5})
    assert known.estimate((1, 2, 3, 5, 9)) == [10.0, 11.0, 12.0, 14.0, 18.0]
    assert Costs().estimate((1, 7)) == [0.0, 0.0]
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
    rate.fade()
    for _ in range(10):
        rate.add(4, 1.0)
    assert rate.value == pytest.approx(4.0, abs=0.2)


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


@dataclass
class World:
    """Forwards of so many milliseconds, and a drafter that is right with the chance it says. `keep`: of drafts so many
    are not refused whatever it says, so 0 is a drafter that is never right."""

    verify: tuple[float, float] = (10.0, 0.15)  # at all, and a row
    step: tuple[float, float] = (1.0, 0.05)
    sureness: float = 2.0
    keep: float = 1.0
    now: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    torch_dice: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def perf_counter(self) -> float:
        return self.now

    def spend(self, price: tuple[float, float], rows: int) -> float:
        seconds = (price[0] + price[1] * rows) / 1000 * self.dice.uniform(0.97, 1.03)
        self.now += seconds
        return seconds

    def log_probs(self, width: int, top_k: int) -> torch.Tensor:
        """(1, width, top_k): some nodes surer than others."""
        logits = torch.randn(1, width, 8, generator=self.torch_dice)
        logits[..., 0] += self.sureness * (1 + torch.randn(1, width, generator=self.torch_dice))
        return (1.5 * logits).log_softmax(-1).sort(dim=-1, descending=True).values[..., :top_k]

    def draft(self, policy, max_depth: int) -> Proposal:
        candidates, width, ids = Candidates(torch.zeros(1, 1, dtype=torch.long)), 1, 0
        for level in range(max_depth):
            self.spend(self.step, width)
            log_probs = self.log_probs(width, policy.top_k)
            new = torch.arange(ids + 1, ids + 1 + log_probs.numel()).view_as(log_probs)
            ids += log_probs.numel()
            candidates.extend(log_probs, new, policy.max_width, policy.scores(log_probs, level))
            width = policy.width(candidates.frontier_scores, level)
            if width == 0:
                break
            candidates.narrow(width)
        tree = candidates.best(policy.count(torch.cat(candidates.scores, dim=1)[:, 1:]))
        guesses = None
        if tree.ids.shape[1] == 1:
            guesses = [(int(candidates.ids[1][0, 0]), float(candidates.log_probs[1][0, 0]))]
        return Proposal(
            tree.ids[:, 1:], tree=None if tree.is_chain else tree, log_probs=tree.log_probs, guesses=guesses
        )

    def judge(self, proposal: Proposal) -> Verdict:
        """Of a node's children at most one is right."""
        children, tokens, path = proposal.children()[0], [], [0]
        while True:
            left, right = self.dice.random(), None
            for token, child in children[path[-1]].items():
                chance = 0.0 if self.keep == 0.0 else math.exp(float(proposal.log_probs[0, child]))
                if left < chance:
                    right = (token, child)
                    break
                left -= chance
            if right is None:
                if proposal.guesses and self.keep and self.dice.random() < math.exp(proposal.guesses[0][1]):
                    return Verdict([[proposal.guesses[0][0]]], [path], [[]])
                return Verdict([[*tokens, -1]], [path], [[]])
            tokens.append(right[0])
            path.append(right[1])

    def expected_tokens(self, proposal: Proposal) -> float:
        """The target's own, and every draft with the chance that its path is right."""
        if not self.keep or not proposal.ids.shape[1]:
            return 1.0
        count = proposal.num_rows
        paths = torch.ones(count, count).tril() if proposal.tree is None else proposal.tree.ancestors[0].float()
        return float((paths @ proposal.log_probs[0]).exp().sum())

    def decode(self, pilot, rounds: int) -> tuple[float, float]:
        """-> the tokens to be expected, and seconds."""
        began, num_tokens = self.now, 0.0
        for _ in range(rounds):
            plan, start = pilot.plan(100, 1, 1), self.now
            proposal = Proposal(torch.zeros(1, 0, dtype=torch.long))
            if plan.depth:
                policy = plan.policy or Fixed(plan.depth, 1, 100)  # the world has no other way to draft a chain
                proposal = self.draft(policy, plan.depth)
            seconds = {"draft": self.now - start, "accept": 0.0}
            seconds["verify"] = self.spend(self.verify, proposal.num_rows)
            verdict = self.judge(proposal)
            num_tokens += self.expected_tokens(proposal)
            pilot.learn(proposal, verdict, seconds, len(verdict.tokens[0]))
        return num_tokens, self.now - began


@pytest.fixture
def world(monkeypatch):
    def make(**figures) -> World:
        made = World(**figures)
        monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=made.perf_counter))
        return made

    return make


def rate(decoded: tuple[float, float]) -> float:
    return decoded[0] / decoded[1]


WORLDS = {
    "cheap_drafter": {"step": (0.3, 0.02)},
    "dear_drafter": {"step": (3.0, 0.1)},
    "rows_are_free": {"verify": (10.0, 0.0)},
    "rows_are_dear": {"verify": (8.0, 2.0)},
    "sure": {"sureness": 5.0},
    "unsure": {"sureness": 0.3},
}


FIXED = {  # depths, and for trees numbers of nodes
    "chains": [(0, 1), (1, 1), (2, 1), (3, 1), (5, 1), (8, 1), (12, 1)],
    "trees": [(3, 9), (5, 17), (7, 25), (7, 61)],
}


@pytest.mark.parametrize("kind", FIXED)
@pytest.mark.parametrize("figures", WORLDS.values(), ids=WORLDS)
def test_no_fixed_setting_is_better(world, figures, kind):
    top_k = TOP_K if kind == "trees" else 1
    fixed = {shape: rate(world(**figures).decode(FixedPilot(shape[0], top_k, shape[1]), 250)) for shape in FIXED[kind]}
    ours, pilot = world(**figures), AutoPilot(Tuner(), top_k)
    ours.decode(pilot, 40)
    assert rate(ours.decode(pilot, 400)) > 0.97 * max(fixed.values()), fixed


def test_trees_are_drawn_where_rows_are_free(world):
    chosen = {}
    for name, verify in {"free": (10.0, 0.0), "dear": (5.0, 3.0)}.items():
        ours, pilot = world(verify=verify, sureness=1.0), AutoPilot(Tuner())
        ours.decode(pilot, 200)
        chosen[name] = sum(count * times for count, times in pilot.drafts_by_count.items()) / 200
    assert chosen["free"] > 4 * chosen["dear"]


def test_a_drafter_that_is_never_right_costs_next_to_nothing(world):
    ours, pilot = world(keep=0.0), AutoPilot(Tuner())
    ours.decode(pilot, 64)
    plain = rate(world(keep=0.0).decode(FixedPilot(0, 1, 1), 500))
    assert rate(ours.decode(pilot, 500)) > 0.97 * plain
    assert pilot.choices["plain"] > 450


def test_drafting_comes_back_when_it_pays_again(world):
    ours, pilot = world(keep=0.0), AutoPilot(Tuner())
    ours.decode(pilot, 300)
    ours.keep, before = 1.0, Counter(pilot.choices)
    ours.decode(pilot, 600)
    assert before["plain"] > 200
    assert (pilot.choices - before)["plain"] < 560
    late = Counter(pilot.choices)
    ours.decode(pilot, 100)
    assert (pilot.choices - late)["plain"] < 10


def test_a_new_call_goes_on_with_what_was_learnt(world):
    ours, tuner = world(), Tuner()
    ours.decode(AutoPilot(tuner), 100)
    pilot = AutoPilot(tuner)
    assert pilot.plan(100, 1, 1).policy.first is None


def test_first_rounds_try_every_size(world):
    ours, pilot = world(), AutoPilot(Tuner())
    ours.decode(pilot, 1 + len(tuning.FIRST))
    assert {1, 5, 9, 17, 33} <= set(pilot.tuner.verify.seconds)
    assert {1, 2, 4, 8} <= set(pilot.tuner.step.seconds)


def test_depth_and_size_stay_within_what_is_left(world):
    world()
    tuner = Tuner()
    assert AutoPilot(tuner).plan(0, 1, 1).depth == 0
    tuner.plain.add(1, 0.01)
    assert AutoPilot(tuner).plan(3, 1, 1).depth == 3
    assert AutoPilot(tuner).plan(100, 1, 1).depth == MAX_DEPTH
    assert AutoPilot(tuner, max_nodes=9).plan(100, 1, 1).max_nodes == 9
    policy = AutoPilot(tuner).plan(100, 1, 1).policy
    assert policy.count(torch.zeros(1, 500)) <= COUNTS[-1]


def test_it_says_what_it_chose_and_why(world):
    ours, pilot = world(), AutoPilot(Tuner())
    ours.decode(pilot, 60)
    assert sum(pilot.choices.values()) == 60
    words = pilot.explain()
    for figure in ("target forwards take 1", "a draft step 1.", "tokens/s", "drafts a round: ", "by depth: "):
        assert figure in words, f"{figure!r} is not in {words!r}"


def test_a_fixed_plan_is_the_users(world):
    world()
    assert FixedPilot(5, 1, 60).plan(100, 1, 1) == tuning.Plan(5)
    assert FixedPilot(5, 4, 16).plan(3, 1, 1) == tuning.Plan(3, Fixed(3, 4, 16))
    assert FixedPilot(5, 4, 16).plan(0, 1, 1).depth == 0
    assert FixedPilot(5, 4, 16).explain() == ""


# --- threads ---


@pytest.fixture
def hasty_threads():
    """Threads take turns as often as they can."""
    found = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(found)


def test_threads_that_share_what_is_learnt(hasty_threads):
    """No observation is lost, and none is seen half made."""
    num_threads, rounds, scores = 4, 20, torch.tensor([[0.9, 0.5, 0.2, 0.1]]).log()
    nothing = Proposal(torch.zeros(1, 0, dtype=torch.long), log_probs=torch.zeros(1, 1))

    def serve(tuner: Tuner, seed: int) -> None:
        torch.set_num_threads(1)
        pilot = AutoPilot(tuner)
        for i in range(rounds):
            policy = pilot.plan(100, 1, 1 + 7 * i + seed).policy  # always another number of tokens to read
            for level in range(4 if policy else 0):
                policy.width(scores, level)
            pilot.learn(
                nothing, Verdict([[1]], [[0]], [[]]), {"draft": 1.0, "verify": 1.0, "accept": 0.0}, 9 if policy else 1
            )
        assert pilot.explain()

    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(30):
            tuner = Tuner()
            list(pool.map(serve, [tuner] * num_threads, range(num_threads)))
            assert tuner.plain.rounds + tuner.drafting.rounds == num_threads * rounds
            for known in (tuner.verify, tuner.read, tuner.step, tuner.rest):
                assert set(known.usual) == set(known.seconds) == {size for size, _ in known.known}


def test_a_round_goes_by_what_was_known_when_it_began(world):
    """Whatever other threads learn meanwhile."""
    ours, tuner = world(), Tuner()
    ours.decode(AutoPilot(tuner), 100)
    policy, scores = AutoPilot(tuner).plan(100, 1, 1).policy, torch.tensor([[0.9, 0.5, 0.2, 0.1]]).log()

    def choices() -> list:
        return [policy.scores(scores[:, None], 1), policy.width(scores, 0), policy.count(scores)]

    before = choices()
    for size in range(1, 60):
        tuner.step.add(size, 1e3)
        tuner.verify.add(size, 1e3)
    for _ in range(100):
        tuner.calibration.learn(-0.1, 1, accepted=False)
    assert_close("choices", choices(), before)
