"""The knowledge about a drafter and a target working together; it outlives calls."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ...acceptance import CHAINS, TREES
from ...modeling import Eagle31DrafterModel
from .calibration import Calibration
from .costs import CostModel
from .exploration import Exploration

Known = TypeVar("Known")


@dataclass
class Knowledge:
    """Costs, calibration and rates of one pair on one kind of call.

    Shared by threads: it is read and written under its lock, which `AutoPlanner` holds. A round under way uses what its
    controller copied when the round began, and hands over what it observed when it is over.
    """

    calibration: Calibration = field(default_factory=Calibration)
    verify: CostModel = field(default_factory=CostModel)  # of verifying and accepting, by nodes
    read: CostModel = field(default_factory=CostModel)  # of the drafter's forward over accepted states, by tokens
    step: CostModel = field(default_factory=CostModel)  # of the drafter's forward over a level of drafts, by nodes
    rest: dict[str, CostModel] = field(
        default_factory=lambda: {CHAINS: CostModel(), TREES: CostModel()}
    )  # of all else in drafting
    exploration: Exploration = field(default_factory=Exploration)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rate(self) -> float:
        """Tokens a second and sequence of the fastest kind of rounds: what a second has to bring."""
        return self.exploration.rate


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
