"""The knowledge about a drafter and a target working together; it outlives calls, and processes."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from statistics import median
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ...acceptance import CHAINS, TREES
from ...modeling import Eagle31DrafterModel
from ...storage.fingerprints import digest, weights_fingerprint
from ...storage.measured import Measured, machine
from ...version import __version__
from .costs import Calibration, CostModel, estimate
from .exploration import Exploration

Known = TypeVar("Known")
KEPT = "knowledge"
# Of verifying and accepting, by nodes; of the drafter's forwards over accepted states, by tokens, and over a level of
# drafts, by nodes; and of all else in drafting chains, and trees.
COSTS = ("verify", "read", "step", CHAINS, TREES)
USUAL_READ_OF_CHAINS = 2  # tokens: of a round before, which the drafter reads first
# The first so many rounds of a process are compared with the times that an earlier process kept. Where they take so
# many times as long, or less than its inverse, the kept times are forgotten: the machine was busier, or is now.
COMPARED_ROUNDS = 3
ALLOWED_CHANGE = 1.3


@dataclass
class Knowledge:
    """Costs, calibration and rates of one pair on one kind of call.

    Shared by threads: it is read and written under its lock, which `AutoPlanner` holds. A round under way uses what its
    controller copied when the round began, and hands over what it observed when it is over.
    """

    calibration: Calibration = field(default_factory=Calibration)
    costs: dict[str, CostModel] = field(default_factory=lambda: {name: CostModel() for name in COSTS})
    exploration: Exploration = field(default_factory=Exploration)
    met: set[tuple[str, int]] = field(default_factory=set)  # kinds and nodes of the rounds of this process
    lock: threading.Lock = field(default_factory=threading.Lock)
    # Nodes and seconds of verifying, as an earlier process kept them; none, once they were compared with this one's.
    kept_seconds: list[tuple[int, float]] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)  # what rounds of this process took, over those
    store: Measured | None = None
    calls: int = 0

    def promise(self) -> float:
        """Returns the tokens a second and sequence that chains of the best depth are expected to give: by the share of
        drafts that were accepted at each depth, over more rounds than rates remember. 0 where that is not known."""
        known = sum(map(bool, self.calibration.seen))
        tokens = list(accumulate(accumulate(self.calibration.going_on[:known], mul), initial=1.0))[1:]
        seconds = self.costs["read"].estimate((USUAL_READ_OF_CHAINS,))[0] + self.costs[CHAINS].estimate((0,))[0]
        step = self.costs["step"].estimate((1,))[0]
        verify = self.costs["verify"].estimate(tuple(range(2, 2 + known)))
        return max((each / (seconds + d * step + verify[d]) for d, each in enumerate(tokens)), default=0.0)

    def add_verify(self, num_nodes: int, seconds: float) -> None:
        """Adds the time that verifying so many nodes, and accepting, took. Where the first rounds show that the machine
        is not as fast, or as slow, as when times were kept, all times and rates are learnt anew. The calibration stays:
        which drafts are accepted is no matter of time."""
        if self.kept_seconds:
            self.changes.append(seconds / estimate(self.kept_seconds, (num_nodes,))[0])
            if len(self.changes) == COMPARED_ROUNDS:
                change, self.kept_seconds = median(self.changes), []
                if not 1 / ALLOWED_CHANGE < change < ALLOWED_CHANGE:
                    self.costs, self.exploration = Knowledge().costs, Exploration()
        self.costs["verify"].add(num_nodes, seconds)

    def keep(self) -> None:
        """Notes that a call is over, and keeps what is known for other processes: after the first, second, fourth call
        and so on, as each learns less that is new."""
        with self.lock:
            self.calls += 1
            if self.store is None or self.calls & (self.calls - 1):
                return
            kept = self.as_dict()
        self.store.put(KEPT, kept)

    def as_dict(self) -> dict[str, Any]:
        """Returns costs, calibration and rates as plain values, for JSON."""
        costs = {name: cost.as_dict() for name, cost in self.costs.items()}
        return {"costs": costs, "calibration": self.calibration.as_dict(), "arms": self.exploration.as_dict()}

    def take_up(self, kept: Any) -> None:
        """Goes on from what `as_dict` returned, in this process or another; leaves all as it is where something else is
        kept, or nothing."""
        try:
            costs = {name: CostModel.of(kept["costs"][name]) for name in COSTS}
            calibration, exploration = Calibration(**kept["calibration"]), Exploration.of(kept["arms"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return
        self.costs, self.exploration = costs, exploration
        self.calibration, self.kept_seconds = calibration, costs["verify"].known


_known: WeakKeyDictionary[Eagle31DrafterModel, WeakKeyDictionary[PreTrainedModel, dict[tuple, Any]]]
_known = WeakKeyDictionary()
_known_lock = threading.Lock()


def knowledge_of(
    make: Callable[[], Known], drafter: Eagle31DrafterModel, target: PreTrainedModel, *kind: object
) -> Known:
    """The knowledge of this pair for one kind of call: device, number of sequences, trees, lock-step or sampled; what
    `make` returns where there is none yet."""
    with _known_lock:
        by_target = _known.setdefault(drafter, WeakKeyDictionary())
        return by_target.setdefault(target, {}).setdefault((make, *kind), make())


def kept_knowledge(drafter: Eagle31DrafterModel, target: PreTrainedModel, *kind: object) -> Knowledge:
    """The knowledge of this pair for one kind of call: this process's, or an earlier one's on this machine, with this
    version of the library; see `add_verify`."""
    config = target.config.to_json_string(use_diff=False) + target.name_or_path
    dtypes = f"{target.dtype} {drafter.dtype}"
    name = digest(config, dtypes, weights_fingerprint(drafter), machine(), __version__, repr(kind))[:32]
    known = knowledge_of(Knowledge, drafter, target, name)
    with known.lock:
        if known.store is None:
            known.store = Measured(f"planning/{name}")
            known.take_up(known.store.get(KEPT))
    return known
