"""The knowledge about a drafter and a target working together; it outlives calls."""

import threading
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ...modeling import Eagle31DrafterModel
from .calibration import Calibration
from .costs import CostModel, Rate


@dataclass
class Knowledge:
    """Costs, calibration and rates of one pair on one kind of call.

    Shared by threads: only `AutoPlanner` reads and writes it, and holds its lock. A round under way uses what its
    controller copied when the round began, and hands over what it observed when it is over.
    """

    calibration: Calibration = field(default_factory=Calibration)
    verify: CostModel = field(default_factory=CostModel)  # of the target's forward, by nodes
    read: CostModel = field(default_factory=CostModel)  # of the drafter's forward over accepted states, by tokens
    step: CostModel = field(default_factory=CostModel)  # of the drafter's forward over a level of drafts, by nodes
    rest: CostModel = field(default_factory=CostModel)  # of drafting, without reading and steps
    drafting: Rate = field(default_factory=Rate)
    plain: Rate = field(default_factory=Rate)
    rounds: int = 0
    pause: int = 0  # plain rounds that the next pause takes; 0: as many as the first one
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rate(self) -> float:
        """Tokens a second of the faster of drafting and plain decoding: what a second has to bring."""
        return max(self.drafting.value, self.plain.value)


_known: WeakKeyDictionary[Eagle31DrafterModel, WeakKeyDictionary[PreTrainedModel, dict[tuple, Knowledge]]]
_known = WeakKeyDictionary()
_known_lock = threading.Lock()


def knowledge_of(drafter: Eagle31DrafterModel, target: PreTrainedModel, *kind: object) -> Knowledge:
    """The knowledge of this pair for one kind of call: number of sequences, trees or not, sampled or not."""
    with _known_lock:
        by_target = _known.setdefault(drafter, WeakKeyDictionary())
        return by_target.setdefault(target, {}).setdefault(kind, Knowledge())
